"""`llmconv generate`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmconv.cli import options
from llmconv.cli.command_group import Command
from llmconv.cli.options import is_file, option, refuse_file_name
from llmconv.errors import InputRefused, UsageProblem
from llmconv.progress import say

if TYPE_CHECKING:
    from llmconv.generation.generate import PromptRun
    from llmconv.generation.prompts import Prompt
    from llmconv.generation.row import TextPiece


def refuse_prefix(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    """Refuses `--prefix`, which is part of the graphs; two options here have similar names."""
    if value is not None:
        raise UsageProblem(
            "`--prefix` is an option of `llmconv export`, which makes a tuned prefix part of the graphs",
            hint="`--prefix-tuning PATH` gives a tuned prefix, `--prompt-prefix TEXT` a text before every prompt",
        )


@click.command("generate", cls=Command)
@click.argument("model", metavar="FOLDER")
@click.argument("texts", metavar="[PROMPT]...", nargs=-1)
@option("--prompt prompts", "Text to continue. May be repeated.", str, multiple=True)
@option(
    "--prompt-file FILE",
    "File with one prompt per line, or JSON lines with `prompt` or `messages`; - for standard input.",
)
@option("--prompt-field NAME", "Field of JSON lines that has the prompt, a text or a chat.")
@option("--image images PATH", "Image in the prompt; may be repeated. In JSON lines the field `image`.", multiple=True)
@option("--output-file FILE", "Write completions to it, as JSON lines.", options.Output())
@option("--overwrite", "Start the output file again. Default: continue after its last line.")
@option("--batch-size", "Number of texts per batch.", click.IntRange(1), show_default=True, default=8)
@option(
    "--num-return-sequences N",
    "Number of texts per prompt: different samples, or the best beams.",
    click.IntRange(1),
    show_default=True,
    default=1,
)
@option(
    "--src-length N", "Cut longer prompts to their last N tokens; special tokens at the start stay.", click.IntRange(1)
)
@option(
    "--add-special-tokens/--no-add-special-tokens",
    "Whether prompts get the tokenizer's special tokens, such as a start token.  [default: yes]",
    default=True,
)
@option("--json-schema FILE", "JSON Schema by which every text is valid JSON.", click.Path(path_type=Path))
@option("--regex PATTERN", "Regular expression that matches every text as a whole.", str)
@option("--stream", "Print the text while it is generated.")
@option("-0 --null", "End each text with a NUL character; no headings between them.")
@option("--chat", "Treat each prompt as a user message, in the tokenizer's chat template.")
@option(
    "--template NAME",
    "As --chat, in alpaca, v1_2, vicuna, or a Jinja file.",
    default="",
    shell_complete=options.templates,
)
@option("--system TEXT", "System message at the start of each chat.", default="")
@option("--prompt-prefix TEXT", "Text before every prompt, run only once.", default="")
@option("--prefix", "See --prefix-tuning.", str, hidden=True, expose_value=False, callback=refuse_prefix)
@options.picking
@options.running
@options.trust_remote_code
@options.as_json
@options.talk
def command(
    model: str,
    texts: tuple[str, ...],
    prompts: tuple[str, ...],
    prompt_file: str | None,
    prompt_field: str | None,
    images: tuple[str, ...],
    output_file: Path | None,
    overwrite: bool,
    stream: bool,
    null: bool,
    as_json: bool,
    **given: Any,
) -> None:
    """Continue prompts with the graphs in FOLDER, or with its eager model.

    FOLDER is a model folder, one .onnx file, or a name in the Hub's cache. Prompts are arguments, the lines of a file,
    or standard input. Defaults come from generation_config.json, whose `do_sample` decides whether tokens are sampled.

    The new text goes to stdout, settings, times and memory go to stderr. Several texts have headings, ==> 1 of 2 <==.
    A prompt that is too long gets no text, and the exit code is 3 when the others are finished.
    """
    from llmconv.generation.generate import prepare
    from llmconv.generation.row import TextPiece

    _require_fitting(texts, output_file, given["prompt_prefix"], overwrite=overwrite, stream=stream, as_json=as_json)
    contents = _prompts((*texts, *prompts), prompt_file, prompt_field, output_file, images)
    model = options.with_graphs(model, given)
    run = prepare(model, contents, **options.settings(given))
    run.talks = True
    show = _printer(run, null=null)
    made = run.run(output_file, overwrite, show if stream and not as_json else None)
    if as_json:
        options.print_json(made.as_dict())
    elif not stream:
        for index, one in enumerate(made.completions):
            show(TextPiece(index, one.text, None, one.finish))
    for line in made.summary():
        say(line)
    if made.too_long:
        verb = "prompt was" if made.too_long == 1 else "prompts were"
        hint = "shorten them, cut them with `--src-length`, or give `--max-new-tokens` in place of `--max-length`"
        raise InputRefused(f"{made.too_long} {verb} too long and got no text; the others are finished", hint=hint)


def _require_fitting(
    texts: Sequence[str], output: Path | None, prompt_prefix: str, *, overwrite: bool, stream: bool, as_json: bool
) -> None:
    """Raises UsageProblem for options that exclude each other, and for file names in place of texts."""
    if stream and as_json:
        raise UsageProblem("`--stream` and `--json` both write to stdout", hint="give one of them")
    if overwrite and not output:
        raise UsageProblem("`--overwrite` needs `--output-file`", hint="leave it out")
    for text in texts:
        if is_file(text) and text.endswith(".onnx"):
            raise UsageProblem(f"the prompt `{text}` is a graph", hint=f"give the decode graph as `--decode {text}`")
        refuse_file_name(text, "prompt", "--prompt-file", f"; `--prompt {text}` continues the name itself")
    if is_file(prompt_prefix):
        problem = f"`--prompt-prefix` takes a text, but `{prompt_prefix}` is a file"
        raise UsageProblem(problem, hint="give the text itself; a tuned prefix is given with `--prefix-tuning PATH`")


def _prompts(
    texts: tuple[str, ...], file: str | None, field: str | None, output: Path | None, images: tuple[str, ...]
) -> list[Prompt]:
    from llmconv.generation.generate import require_other_file
    from llmconv.generation.prompts import Prompt, read_prompts

    if texts and file:
        raise UsageProblem("prompts are given both as arguments and in a file", hint="give only one of them")
    if texts and field:
        raise UsageProblem("`--prompt-field` needs `--prompt-file` or standard input", hint="leave it out")
    if len(texts) > 1 and images:
        problem = "`--image` goes with one prompt"
        raise UsageProblem(problem, hint="for several, give JSON lines with the fields `prompt` and `image`")
    if texts:
        return [Prompt(text, images=images) for text in texts]
    if images:
        problem = "`--image` needs a prompt on the command line"
        raise UsageProblem(problem, hint="in a prompt file, give each line a field `image`")
    if file and file != "-":
        require_other_file(file, output)
        return read_prompts(Path(file), field)
    if sys.stdin is None or (not file and sys.stdin.isatty()):
        raise UsageProblem("no prompt is given", hint="give one after the folder, or `--prompt-file`")
    return read_prompts(sys.stdin, field)


def _printer(run: PromptRun, *, null: bool) -> Callable[[TextPiece], None]:
    """Prints texts on stdout in order; several of them have headings, or with `null` each ends with a NUL character."""
    from llmconv.generation.row import OrderedWriter

    prompts, count = len(run.prompts), run.count
    writers: list[OrderedWriter] = []  # one, from the first piece on: then it is known what the file had before

    def heading(index: int) -> str:
        number, sequence = divmod(index, count)
        name = f"{number + 1} of {prompts}" + (f", text {sequence + 1} of {count}" if count > 1 else "")
        return "" if null or prompts * count == 1 else f"==> {name} <==\n"

    def write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    def show(piece: TextPiece) -> None:
        if not writers:
            writers.append(OrderedWriter(write, run.skipped, "\0" if null else "\n", heading))
        writers[0].push(piece.index, piece.text, bool(piece.finish))

    return show
