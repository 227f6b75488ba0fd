"""What several commands share: options, completions of the shell, texts that are file names, the printed plan.

The second half are those of the commands that generate text: backend and session, sampling, chat template.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem

from llmconv.addresses import HubAddress, StoreAddress, hub_address, is_hub_address
from llmconv.argument_checks import ELEMENT_TYPES
from llmconv.errors import InputRefused, UsageProblem, printable
from llmconv.files.paths import output_path, output_place
from llmconv.progress import set_quiet

Command = TypeVar("Command", bound=Callable[..., Any])
VERBOSE = "llmconv.verbose"  # key in click's `Context.meta` under which a command stores `-v` for the group
MADE = "llmconv.made"  # key of a dict: folders that were made in the cache, and what the user named in their place
NO_PATHS = {"texts"}  # arguments that are texts; all others are paths or model names


def option(spec: str, text: str, kind: Any = None, **more: Any) -> Callable[[Command], Command]:
    """An option of a command; `spec` has its spellings, then the name of its parameter and its metavar, if any.

    `kind` is its type, a list for one of several words; without type and metavar it is a flag. `text` is its help, to
    which a default that is a word is added.
    """
    names = [word for word in spec.split() if word.startswith("-") or (word.isidentifier() and word.islower())]
    metavar = next((word for word in spec.split() if word not in names), None)
    if kind is None and metavar is None and "/" not in spec:
        more["is_flag"] = True
    if isinstance(more.get("default"), str) and more["default"]:
        more["show_default"] = True
    kind = click.Choice(kind) if isinstance(kind, list) else kind
    return click.option(*names, type=kind, metavar=metavar, help=text, **more)


def refuse_empty_paths(command: click.Command) -> click.Command:
    """Makes the command and its subcommands refuse `""` as a path, which would mean the current folder."""
    for below in command.commands.values() if isinstance(command, click.Group) else ():
        refuse_empty_paths(below)
    for parameter in command.params:
        is_text = isinstance(parameter, click.Argument) and parameter.name not in NO_PATHS
        if isinstance(parameter.type, Output):
            continue  # checks it itself
        if isinstance(parameter.type, click.Path):
            parameter.type = NamedPath(path_type=parameter.type.type)
        elif is_text or parameter.metavar in ("PATH", "FILE"):
            parameter.type = NamedText()
    return command


def _require_name(value: Any, param: click.Parameter | None, ctx: click.Context | None) -> None:
    if isinstance(value, str) and not value.strip():
        raise click.UsageError(f"`{_shown(param)}` is empty, which is not the name of a file or folder", ctx)


def _shown(param: click.Parameter | None) -> str:
    return (param.opts[-1] if isinstance(param, click.Option) else param.human_readable_name) if param else "path"


class NamedPath(click.Path):
    """A path on this machine that is not empty."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """As click's, which would change `hf://…` to `hf:/…`."""
        _require_name(value, param, ctx)
        if isinstance(value, str) and "://" in value:
            raise click.UsageError(f"`{_shown(param)}` takes a path on this machine, not an address", ctx)
        return super().convert(value, param, ctx)


class CompletesPaths:
    """Lets the shell complete a path."""

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(incomplete, type="file")]


class NamedText(CompletesPaths, click.types.StringParamType):
    """A local path, a URI or a Hub id that is not empty."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        _require_name(value, param, ctx)
        return super().convert(value, param, ctx)


class Output(CompletesPaths, click.ParamType):  # type: ignore[type-arg] # generic for the type checker alone
    """A local file or folder to write: the type of every option for one."""

    name = "path"
    is_written = True

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Path | StoreAddress | HubAddress:
        """See `output_path`; click.Path would change `s3://…` to `s3:/…` before it can be checked."""
        return output_path(value, param.opts[-1] if param else "output")


class OutputFolder(Output):
    """A folder to write, on this machine, in an object store or on the Hub."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Path | StoreAddress | HubAddress:
        return output_place(value, param.opts[-1] if param else "output")


class ElementType(click.Choice):  # type: ignore[type-arg] # generic for the type checker alone
    """The name of an element type, or its short form such as `bf16`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(ELEMENT_TYPES.get(str(value), value), param, ctx)


class Duration(click.ParamType):  # type: ignore[type-arg] # generic for the type checker alone
    """A time in seconds, such as `60s`, `5m` or `1h`."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        from llmconv.verify.scenarios.selection import parse_budget

        return parse_budget(str(value))


output = option(
    "-o --output PATH",
    "Folder to write, on this machine, in an object store (s3://BUCKET/FOLDER, also gs, az and oci), or on the "
    "Hugging Face Hub (hf://ORG/NAME, hf://ORG/NAME@BRANCH).",
    OutputFolder(),
    required=True,
)
dtype = option(
    "--dtype",
    "Element type of the floating-point weights.",
    ElementType(["keep", "float32", "float16", "bfloat16"]),
    default="keep",
)
max_shard_size = option("--max-shard-size SIZE", "Maximum size of a safetensors file.", default="5GB")
asked_shard_size = option("--max-shard-size SIZE", "Maximum size of a safetensors file.  [default: 5GB]")
kept_shard_size = option(
    "--max-shard-size SIZE",
    "Maximum size of a safetensors file; keep: split as in BASE, and copy files without changes.",
    default="keep",
)
overwrite = option("--overwrite", "Replace OUT if llmconv wrote it.")
resume = option("--resume", "Continue an interrupted run.")
trust_remote_code = option("--trust-remote-code", "Run the Python code in the model's folder; only if you trust it.")
dry_run = option("--dry-run", "Print the plan (tensors, bytes, disk needed) and stop.")
as_json = option("--json as_json", "Print one JSON object to stdout.")


def talk(
    command: Command,
    quiet: str = "Hide messages and progress bars (stderr).",
    verbose: str = "Show the traceback of an error.",
) -> Command:
    """Adds `-q` and `-v`, with these help texts, to the function of a command."""

    def explain(ctx: click.Context, param: click.Parameter, value: bool) -> None:
        ctx.meta[VERBOSE] = value

    quieted = option("-q --quiet", quiet, expose_value=False, callback=lambda ctx, param, value: set_quiet(value))
    return quieted(option("-v --verbose", verbose, expose_value=False, callback=explain)(command))


def shares(command: Command) -> Command:
    """Adds `--part`, `--finish`, `--workers` and `--engine`, which become the argument `work`."""

    def share(ctx: click.Context, param: click.Parameter, value: Any) -> None:
        if value is None or value is False:  # 0 equals False, and is refused
            return
        from llmconv.output.work import Finish, Part, Ray, Work, Workers

        if ctx.params.get("work"):
            raise click.UsageError("`--part`, `--finish`, `--workers` and `--engine` exclude each other", ctx)
        given: dict[str, Callable[[Any], Work]] = {
            "part": Part.parse,
            "finish": lambda _: Finish(),
            "workers": Workers,
            "engine": lambda _: Ray(),
        }
        ctx.params["work"] = given[str(param.name)](value)

    for add in (
        option(
            "--engine",
            "Write the shards in tasks of a Ray cluster: that of RAY_ADDRESS, or one on this machine.",
            ["ray"],
            expose_value=False,
            callback=share,
        ),
        option(
            "--workers N", "Write the shards in N processes of this machine.", int, expose_value=False, callback=share
        ),
        option("--finish", "Publish OUT, whose parts were written with --part.", expose_value=False, callback=share),
        option("--part I/N", "Write part I of N, from 0/N, and publish nothing.", expose_value=False, callback=share),
    ):
        command = add(command)
    return command


def writing(command: Command, shard_size: Callable[[Command], Command] = kept_shard_size) -> Command:
    """The options of every command that writes a model folder, by default a changed one."""
    for add in (talk, as_json, dry_run, resume, overwrite, shard_size, dtype, output):
        command = add(command)
    return command


def print_json(content: dict[str, Any]) -> None:
    click.echo(json.dumps(content, indent=2))


# A text that is most likely a file name given by mistake
FILE_OF_TEXTS = re.compile(r"\S+\.(?:txt|jsonl?|csv)", re.IGNORECASE)


def is_file(text: str) -> bool:
    """Whether a text has a suffix and is the name of a file."""
    with suppress(OSError, ValueError):  # too long for a name, or with an invalid character
        return bool(Path(text).suffix) and Path(text).is_file()
    return False


def refuse_file_name(text: str, kind: str, option: str, otherwise: str = "") -> None:
    """Raises UsageProblem if a text of the command line is the name of a file.

    `kind` is what it should be (a prompt, a text), `option` reads the texts of a file, `otherwise` ends the hint.
    """
    if is_file(text) or FILE_OF_TEXTS.fullmatch(text):
        problem = f"the {kind} `{text}` is the name of a file{'' if is_file(text) else ', which does not exist'}"
        raise UsageProblem(problem, hint=f"give `{option} {text}` to read its {kind}s{otherwise}")


# as click's `shell_complete`: from the beginning of a value to the values
Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]
LAYOUTS = ("onnxruntime", "genai", "optimum", "transformersjs")
# the modules with these take seconds to import, which is too long for a key; a test compares them
CLIENTS = (*LAYOUTS[1:], "llamacpp", "vllm")


def completed(names: Callable[[], Iterable[str]], *, paths: bool = False) -> Complete:
    """A completion from all `names`; with `paths`, a value that begins none of them is completed as a path."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        found = [CompletionItem(name) for name in names() if name.startswith(incomplete)]
        return found or ([CompletionItem(incomplete, type="file")] if paths else [])

    return complete


layouts = completed(lambda: LAYOUTS)
clients = completed(lambda: CLIENTS)


@completed
def formats() -> list[str]:
    from llmconv.convert.formats import formats

    return [name for name, one in formats().items() if one.save is not None]


@completed
def deltas() -> list[str]:
    from llmconv.convert.deltas.arithmetic import SCRIPTS
    from llmconv.convert.formats import delta_formats

    return [*(name for name, one in delta_formats().items() if one.save is not None), *SCRIPTS]


@partial(completed, paths=True)
def templates() -> list[str]:
    from llmconv.runtime.chat_templates import TEMPLATES

    return [*TEMPLATES]


if TYPE_CHECKING:
    from llmconv.output.plan import Plan


def as_result(plan: Plan, output: Path, dry_run: bool) -> dict[str, Any]:
    return {
        "model_type": plan.checkpoint.config.get("model_type"),
        "output": str(output),
        "tensors": sum(len(shard.tensors) for shard in plan.shards),
        "bytes": plan.nbytes,
        "files": [shard.name for shard in plan.shards],
        "copied": [shard.name for shard in plan.shards if shard.copy_of],
        "written": not dry_run and not plan.found,
        **({"part": plan.part} if plan.part else {}),
    }


def print_plan(
    plan: Plan, output: Path, dry_run: bool, more: str = "", fate: Callable[[str], str] | None = None
) -> None:
    """Prints one line about the written folder, ending with `more`; in a dry run also every tensor with its `fate`."""
    from llmconv.output.writer import destination_of

    count = sum(len(shard.tensors) for shard in plan.shards)
    copied = sum(shard.nbytes for shard in plan.shards if shard.copy_of)
    sizes = f"{count} tensors, {plan.nbytes:,} bytes in {len(plan.shards)} file(s)"
    sizes += f", {copied:,} of them copied unchanged" if copied else ""
    verb = "would write" if dry_run else "found" if plan.found else "wrote"
    verb += f" part {plan.part} of" if plan.part else ""
    click.echo(f"{verb} {output}: {printable(plan.checkpoint.kind)}, {sizes}{more}")
    if not dry_run:
        return
    click.echo(f"disk needed: {destination_of(output).space_needed(plan):,} bytes")
    for shard in plan.shards:
        made = f"to copy from {shard.copy_of.name}" if shard.copy_of else "to write"
        click.echo(f"  {shard.name}  {made}  {len(shard.tensors)} tensors  {shard.nbytes:,} bytes")
        for name, tensor in shard.tensors.items():
            place = f"{shard.name}  " if len(plan.shards) > 1 else ""
            click.echo(
                f"  {place}{name}  {tensor.dtype.name}  {list(tensor.shape)}" + (f"  {fate(name)}" if fate else "")
            )


template = option(
    "--template NAME",
    "Chat template: tokenizer (its own), alpaca, v1_2, vicuna, or a Jinja file.",
    default="tokenizer",
    shell_complete=templates,
)

PICKING = (
    option(
        "--max-new-tokens",
        "Maximum number of new tokens. Default: generation_config.json, else 64 (chat: 2048).",
        click.IntRange(1),
    ),
    option("--max-length", "Maximum number of tokens, prompt included.", click.IntRange(1)),
    option("--temperature", "Sampling temperature; 0 means greedy decoding.", click.FloatRange(0)),
    option("--top-k", "Sample from the k likeliest tokens; 0 for all. Default: 50.", click.IntRange(0)),
    option(
        "--top-p", "Sample from the likeliest tokens with total probability p.", click.FloatRange(0, 1, min_open=True)
    ),
    option("--min-p", "Sample from tokens at least p times the likeliest.", click.FloatRange(0, 1)),
    option("--repetition-penalty", "Repetition penalty; 1: none.", click.FloatRange(0, min_open=True)),
    option("--num-beams", "Number of beams for beam search.", click.IntRange(1)),
    option("--stop stop_strings STRING", "Stop string. May be repeated.", multiple=True),
    option("--seed", "Random seed for sampling.", click.IntRange(0)),
)
ADAPTER = option(
    "--adapter PATH", "LoRA adapter for graphs of `export --lora-inputs`; any adapter with `--backend torch`."
)
BACKEND = (
    option("--backend", "Runtime to use.", ["onnx", "torch", "genai"], default="onnx"),
    option(
        "--export/--no-export first_export",
        "Whether a folder without graphs is exported once, into ~/.cache/llmconv, which links its weights, and a "
        "training checkpoint converted there before.  "
        "[default: yes]",
        default=True,
    ),
    option("--decode FILE", "Decode graph, for a prefill graph.", click.Path(path_type=Path)),
    option("--tokenizer PATH", "Folder of another tokenizer.  [default: the model's]"),
    ADAPTER,
    option("--prefix-tuning PATH", "Tuned prefix before every prompt: PEFT adapter, or PaddleNLP's pre_caches.npy."),
    option(
        "--speculate MODEL",
        "Guessed tokens that a call may run too: lookup (the text repeats itself), off, mtp (guesses of the head, see "
        "`export --mtp`), or the folder of a smaller model with the same vocabulary, which guesses. The text is the "
        "same.  [default: lookup]",
    ),
    option(
        "--form",
        "auto: run graphs in the form that is fastest on the CPU, made in memory, weights packed if memory allows; "
        "mapped: without a copy of weights; file: as they are.  [default: auto]",
        ["auto", "mapped", "file"],
    ),
    option("--device NAME", "Device of torch: cpu, cuda, cuda:1, …, with `--backend torch`."),
    option(
        "--dtype",
        "Dtype of the model, with `--backend torch`. Default: that of its weights.",
        ElementType(["float32", "float16", "bfloat16"]),
    ),
)
SESSION = (
    option("--provider NAME", "Provider of onnxruntime: cpu, cuda, …; the CPU runs the rest."),
    option("--threads", "Threads of onnxruntime or torch; 0 for one per core.", click.IntRange(0)),
    option("--session-config FILE", "Session options, .ini or JSON.", click.Path(path_type=Path)),
    option(
        "--timeout SECONDS",
        "Time limit for a run of a small graph; larger models and prompts get more. Default: 60.",
        click.FloatRange(0, min_open=True),
    ),
    option("--prepack", "Copy weights to a faster layout in memory. Default: map the files."),
    option(
        "--packed-cache",
        "Like `--prepack`, but write the copy to ~/.cache/llmconv once, and map it from then on: several "
        "processes share its memory.",
    ),
)
STAGES = (
    option(
        "--stage-at [N=]HOST:PORT",
        "Address of a stage that `llmconv serve-stage` runs, once per stage; the others run here, or with "
        "`--stage-at ray` in actors of a Ray cluster.",
        multiple=True,
    ),
    option(
        "--stage-timeout SECONDS",
        "A stage is lost after this time without a heartbeat. Default: 20.",
        click.FloatRange(0.1, 3600),
    ),
)


def picking(command: Command) -> Command:
    """Adds the options for sampling and length, whose defaults are in `generation_config.json`."""
    return _with(command, PICKING)


def running(command: Command) -> Command:
    """Adds the options for backend, session and stages in other processes."""
    return _with(command, (*BACKEND, *SESSION, *STAGES))


def running_adapters(command: Command) -> Command:
    """As `running`, with several adapters in place of one."""
    several = option(
        "--adapter adapters NAME=PATH",
        "LoRA adapter that requests choose by its name, for graphs of `export --lora-inputs`; may be repeated. A path "
        "alone is the adapter of all requests.",
        multiple=True,
    )
    return _with(command, (*(several if one is ADAPTER else one for one in BACKEND), *SESSION, *STAGES))


def adapters_of(given: Sequence[str]) -> tuple[str | None, dict[str, str]]:
    """The adapter of all requests, if any, and the paths of the others by their names; UsageProblem for names twice."""
    base, named = None, dict[str, str]()
    for one in given:
        name, mark, path = one.partition("=")
        if not mark or Path(one).exists():
            if base is not None:
                problem = f"`{base}` and `{one}` are both the adapter of all requests"
                raise UsageProblem(problem, hint="give names: `--adapter NAME=PATH`")
            base = one
        elif name in named:
            raise UsageProblem(f"two adapters have the name `{name}`", hint="`--adapter NAME=PATH`")
        else:
            named[name] = path
    return base, named


def session(command: Command) -> Command:
    return _with(command, SESSION)


def _with(command: Command, decorators: tuple[Callable[[Command], Command], ...]) -> Command:
    for decorator in reversed(decorators):
        command = decorator(command)
    return command


def settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """The given options without those that were left out; sampling options turn on `do_sample`."""
    fields = {name: value for name, value in given.items() if value is not None}
    if {"max_new_tokens", "max_length"} <= fields.keys():
        problem = "`--max-new-tokens` and `--max-length` both set the length"
        raise UsageProblem(problem, hint="give one of them: `--max-length` includes the prompt")
    if not fields.get("stop_strings"):
        fields.pop("stop_strings", None)
    if "temperature" in fields:
        fields["do_sample"] = fields["temperature"] > 0
    elif {"top_k", "top_p", "min_p"} & fields.keys():
        fields["do_sample"] = True
    return fields


def without_running(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options other than those of `running` and `--trust-remote-code`."""
    from llmconv.generation.generate import OF_RUNNING

    return {name: value for name, value in given.items() if name not in OF_RUNNING}


def repository_of(model: str) -> str:
    """The `org/name` of a model of the Hub, by which its clients call it; empty for anything else."""
    from llmconv.files.sources import is_hub_id

    return hub_address(model).repository if is_hub_address(model) or is_hub_id(model) else ""


def with_graphs(model: str, given: dict[str, Any]) -> str:
    """The model, or the folder in the cache with its graphs, as for `speculate`; takes `first_export` out."""
    wanted = given.pop("first_export")
    others = ("decode", "adapter", "prefix_tuning", "stage_at", "trust_remote_code")
    if (smaller := given.get("speculate")) not in (None, "", "lookup", "mtp", "off"):
        same = {name: given[name] for name in ("backend", "trust_remote_code")}
        given["speculate"] = with_graphs(smaller, {**dict.fromkeys(others), **same, "first_export": wanted})
    if not wanted or given["backend"] != "onnx" or any(given[name] for name in others):
        return model
    from llmconv.generation.runners import from_hub_cache, graphs_in_cache

    folder = Path(model) if Path(model).exists() else None
    with suppress(InputRefused):  # what opens the model says more: of its options, too, and of a misspelled word
        folder = folder or from_hub_cache(model)
    if folder and (made := graphs_in_cache(folder)):
        click.get_current_context().meta.setdefault(MADE, {})[str(made)] = model
        return str(made)
    return model
