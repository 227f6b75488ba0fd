"""llmconv generate: prompts in, text out."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmconv.cli import generation_options, options
from llmconv.errors import UsageProblem
from llmconv.progress import say

if TYPE_CHECKING:
    from llmconv.generation import Completion, GenerationCost, GenerationSettings, TextModel, TextPiece, Wording
    from llmconv.generation.prompts import Prompt


def refuse_prefix(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    """`--prefix` is a tuned prefix everywhere, and graphs have it in them."""
    if value is not None:
        raise UsageProblem(
            "`--prefix` is a tuned prefix, which `llmconv export --prefix PATH` makes part of the graphs",
            hint="a text before every prompt is `--prompt-prefix TEXT`",
        )


@click.command("generate")
@click.argument("model", metavar="FOLDER")
@click.argument("texts", metavar="[PROMPT]...", nargs=-1)
@click.option("--prompt", "prompts", multiple=True, help="Text to continue; may be repeated.")
@click.option(
    "--prompt-file",
    metavar="FILE",
    help="One prompt per line, or JSON lines with `prompt` or `messages`; - is standard input.",
)
@click.option("--output-file", type=options.Output(), metavar="FILE", help="Completions as JSON lines.")
@click.option("--overwrite", is_flag=True, help="Begin the output file again; else a run goes on where it ended.")
@click.option("--batch-size", type=click.IntRange(1), default=8, show_default=True, help="Prompts side by side.")
@click.option("--stream", is_flag=True, help="Print the text while it grows.")
@click.option("--chat", is_flag=True, help="A prompt is a user's message in the tokenizer's chat template.")
@click.option("--template", default="", metavar="NAME", help="The same in alpaca, v1_2, vicuna, or a file in Jinja.")
@click.option("--system", default="", metavar="TEXT", help="The message of the system that a chat begins with.")
@click.option("--prompt-prefix", default="", metavar="TEXT", help="Text before every prompt; run once for all of them.")
@click.option("--prefix", hidden=True, expose_value=False, callback=refuse_prefix, help="See --prompt-prefix.")
@generation_options.picking
@generation_options.running
@options.trust_remote_code
@options.as_json
@options.talk
def command(
    model: str,
    texts: tuple[str, ...],
    prompts: tuple[str, ...],
    prompt_file: str | None,
    output_file: Path | None,
    overwrite: bool,
    batch_size: int,
    stream: bool,
    chat: bool,
    template: str,
    system: str,
    prompt_prefix: str,
    as_json: bool,
    **given: Any,
) -> None:
    """Continue prompts with the graphs in FOLDER, or with its eager model.

    FOLDER is a model folder, one .onnx file, or a name in the hub's cache. Prompts are arguments, the lines of a file,
    or else standard input. What is not given is as generation_config.json says, in which `do_sample` decides whether
    tokens are drawn.

    The new text goes to stdout, what it cost to stderr.
    """
    from llmconv.generation import Wording
    from llmconv.generation.generate import settings_for

    _require_fitting(texts, output_file, prompt_prefix, overwrite=overwrite, stream=stream, as_json=as_json)
    wording = Wording(prompt_prefix, template or ("tokenizer" if chat or system else ""), system)
    picked = generation_options.settings(given)
    asked = _prompts((*texts, *prompts), prompt_file, output_file)
    opened = generation_options.opener(model, given)()
    settings = settings_for(opened, wording, picked)
    run = _Run(opened, asked, settings, wording, batch_size)
    if output_file:
        run.to_file(output_file, str(given["adapter"] or ""), overwrite, _writer(stream, run))
    else:
        run.collect(_writer(stream and not as_json, run))
    if as_json:
        options.print_json(_as_dict(run))
    elif not stream:
        click.echo("".join(f"{completion.text}\n" for completion in run.completions), nl=False)
    _report(run)


MODEL_FILES = ("*.onnx", "*.safetensors", "tokenizer.json")
"""Files of which size and time tell that a model is still the one that an output file was begun with."""


class _Run:
    """One call of the command, and what came of it."""

    def __init__(
        self,
        model: TextModel,
        prompts: Sequence[Prompt],
        settings: GenerationSettings,
        wording: Wording,
        batch_size: int,
    ) -> None:
        self.model, self.prompts, self.settings = model, prompts, settings
        self._wording, self._batch_size = wording, batch_size
        self.completions: list[Completion] = []
        self.costs: list[GenerationCost] = []
        self.skipped = 0
        self.output: Path | None = None

    def collect(self, on_piece: Callable[[TextPiece], None] | None) -> None:
        """Runs all prompts and keeps what they gave."""
        self._run(self.completions.extend, on_piece)

    def to_file(self, path: Path, adapter: str, overwrite: bool, on_piece: Callable[[TextPiece], None] | None) -> None:
        """Runs the prompts that the file does not have yet."""
        from llmconv.generation.completion_file import CompletionFile

        folder = self.model.folder.resolve()
        files = sorted(path for kind in MODEL_FILES for path in folder.glob(kind))
        state = {path.name: (path.stat().st_size, path.stat().st_mtime_ns) for path in files}
        model = {"model": str(folder), "files": state, "backend": self.model.backend, "adapter": adapter}
        made_with = {**asdict(self.settings), **asdict(self._wording), **model}
        self.output = path
        with CompletionFile(path, self.prompts, made_with, overwrite=overwrite) as file:
            self.skipped = file.done
            self._run(file.write, on_piece)

    def _run(self, take: Callable[[list[Completion]], object], on_piece: Callable[[TextPiece], None] | None) -> None:
        from llmconv.generation.generate import run_batches

        for completions, cost in run_batches(
            self.model,
            [prompt.content for prompt in self.prompts],
            self.settings,
            wording=self._wording,
            batch_size=self._batch_size,
            skip=self.skipped,
            on_piece=on_piece,
        ):
            take(completions)
            self.costs.append(cost)
            if len(self.prompts) > self._batch_size:
                say(f"batch {len(self.costs)}: {_told(cost)}")


def _require_fitting(
    texts: Sequence[str], output: Path | None, prompt_prefix: str, *, overwrite: bool, stream: bool, as_json: bool
) -> None:
    """Refuses options of which one would be ignored, and names of files that would pass for texts.

    Raises:
        UsageProblem: see there.
    """
    if stream and as_json:
        raise UsageProblem("`--stream` and `--json` both write to stdout", hint="give one of them")
    if overwrite and not output:
        raise UsageProblem("`--overwrite` is for `--output-file`, which is not given", hint="leave it out")
    for text in texts:
        if is_file(text) or PROMPT_FILE.fullmatch(text):
            raise UsageProblem(
                f"the prompt `{text}` is the name of a file{'' if is_file(text) else ', which does not exist'}",
                hint=f"`--prompt-file {text}` reads its prompts; `--prompt {text}` continues the name itself",
            )
    if is_file(prompt_prefix):
        raise UsageProblem(
            f"`--prompt-prefix` is a text, and `{prompt_prefix}` is the name of a file",
            hint="a tuned prefix is part of the graphs: `llmconv export MODEL --prefix PATH`; a text is given itself",
        )


PROMPT_FILE = re.compile(r"\S+\.(?:txt|jsonl?|csv)", re.IGNORECASE)
"""A text that nobody would have continued."""


def is_file(text: str) -> bool:
    """Whether a text is the name of a file, as far as its ending shows."""
    with suppress(OSError, ValueError):  # too long for a name, or with a character that no name has
        return bool(Path(text).suffix) and Path(text).is_file()
    return False


def _prompts(texts: tuple[str, ...], file: str | None, output: Path | None) -> list[Prompt]:
    """Those of the command line, else those of a file, else those of standard input."""
    from llmconv.generation.prompts import Prompt, read_prompts

    if texts and file:
        raise UsageProblem("prompts are given twice", hint="give them as arguments or in a file")
    if texts:
        return [Prompt(text) for text in texts]
    if file and output and Path(file).resolve() == output.resolve():
        raise UsageProblem("`--output-file` is the file of the prompts", hint="give another one")
    if file and file != "-":
        return read_prompts(Path(file))
    if sys.stdin is None or (not file and sys.stdin.isatty()):
        raise UsageProblem("no prompt is given", hint="give one behind the folder, or `--prompt-file`")
    return read_prompts(sys.stdin)


def _writer(streaming: bool, run: _Run) -> Callable[[TextPiece], None] | None:
    """Prints pieces as they come, the texts in the order of the prompts."""
    if not streaming:
        return None
    from llmconv.generation.streaming import OrderedWriter

    def write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    writer: list[OrderedWriter] = []

    def on_piece(piece: TextPiece) -> None:
        if not writer:
            writer.append(OrderedWriter(len(run.prompts), write, run.skipped))
        writer[0].push(piece.index, piece.text, bool(piece.finish))

    return on_piece


def _as_dict(run: _Run) -> dict[str, object]:
    from llmconv.generation import GenerationCost

    made: dict[str, object] = {"completions": [asdict(completion) for completion in run.completions]}
    if run.output:
        made = {"output_file": str(run.output), "kept": run.skipped}
    costs, total = [cost.as_dict() for cost in run.costs], GenerationCost.sum(run.costs).as_dict()
    if costs:
        total["time_to_first_token"] = costs[0]["time_to_first_token"]
    return {"backend": run.model.backend, **made, "batches": costs, **total}


def _report(run: _Run) -> None:
    """What all of it cost."""
    from llmconv.generation import GenerationCost

    if run.skipped:
        say(f"{run.skipped} of {len(run.prompts)} prompts were finished before")
    if run.costs:
        say(_told(GenerationCost.sum(run.costs), len(run.costs)))


def _told(cost: GenerationCost, batches: int = 1) -> str:
    counts = f"{cost.prompt_tokens} tokens in, {cost.new_tokens} out"
    first = f"{'first token after' if batches == 1 else 'prompts took'} {cost.first_seconds:.3f} s"
    return f"{counts}; {first}, then {cost.rate:.1f} tokens/s; peak memory {cost.peak_bytes / 1e9:.2f} GB"
