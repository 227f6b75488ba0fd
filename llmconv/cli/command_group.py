"""The group of commands, the same for all: help, exit codes, error messages, signals and closed standard streams."""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
import tomllib
import traceback
from collections import UserDict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache, partial
from importlib import import_module, resources
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import click
from click import group, version_option

from llmconv.background import end_if_hung
from llmconv.cli.options import MADE, VERBOSE, refuse_empty_paths
from llmconv.errors import KEPT, LlmconvError, OutputFailed, UsageProblem, first_line, printable, usage_line
from llmconv.memory import is_out_of_memory
from llmconv.progress import status
from llmconv.requirements import require_platform, require_transformers, unusable_package
from llmconv.version import __version__

MANY = 15  # number of options from which on they are shown under headings
OTHER, MESSAGES = "Options", "Messages"

# headings in their order, with the parameters below each
COMMON = {
    "Input": "format config tokenizer base adapter strategy root code drop qkv_layout",
    "Prompts": (
        "prompts prompt_file prompt_field images chat template system prompt_prefix src_length add_special_tokens "
        "batch_size"
    ),
    "Sampling and length": (
        "max_new_tokens max_length temperature top_k top_p min_p repetition_penalty num_beams "
        "num_return_sequences stop_strings seed json_schema regex"
    ),
    "Output": "output output_file dtype imatrix max_shard_size graphs_only verify stream null overwrite resume dry_run",
    "Merge": "weights initial_adapters combine densities rank majority_sign base_quant alpha check",
    "Division of the work": "part finish workers engine",
    "Graphs": (
        "task no_cache prefill incremental unified graph_name layout embeds mtp last_logits postprocess stages "
        "lora_inputs prefix opset"
    ),
    "Shapes and cache": "shapes max_seq_len prompt_len cache",
    "Runtime and precision": "target strict_target precision logits_dtype",
    "Quantization": (
        "scheme base_format quant quant_block symmetric quant_exclude quant_bits method calibrate static_activations "
        "kv_cache"
    ),
    "Server": (
        "host port name parallel queue tool_parser reasoning_parser api_key log_prompts allow_hosts allow_origins"
    ),
    "What is compared": "graphs input_map reference allow_changed",
    "Scenarios": "suite scenario budget repeat layers low_memory",
    "Cost of quantization": "text max_divergence min_agreement",
    "Report": "report github bisect minimize record",
    "Other clients": "clients pythons",
    "Model": "backend first_export decode prefix_tuning device trust_remote_code",
    "Runtime": "provider threads session_config timeout prepack packed_cache form speculate",
    "Stages on other hosts": "stage_at stage_timeout",
    MESSAGES: "as_json quiet verbose help",
}
RUNNING = {"tokenizer": "Model", "adapter": "Model", "dtype": "Model"}
# headings of parameters that mean something else in a command
OWN: dict[str, dict[str, str]] = {
    "to-hf": {"trust_remote_code": "Input"},
    "quantize": {"adapters": "Input"},
    "merge-lora": {"seed": "Merge", "tokenizer": "Output"},
    "export": {"batch_size": "Shapes and cache", "trust_remote_code": "Graphs"},
    "verify": {"calibrate": "What is compared", "method": "Scenarios", "adapter": "What is compared"}
    | {"trust_remote_code": "What is compared"},
    "generate": RUNNING,
    "chat": RUNNING,
    "serve": {
        "tokenizer": "Model",
        "dtype": "Model",
        "adapters": "Model",
        "max_new_tokens": "Server",
        "system": "Server",
        "template": "Server",
    },
}
# the commands, in the order of the work
SECTIONS: dict[str, tuple[str, ...]] = {
    "Convert and merge": ("inspect", "to-hf", "from-hf", "to-gguf", "merge-lora", "quantize", "delta"),
    "Export and verify": ("export", "onnx-adapter", "verify", "push", "run"),
    "Generate and serve": ("generate", "embed", "chat", "serve", "serve-stage", "bench"),
    "Other": ("clean", "formats", "families", "doctor"),
}


def path_of(ctx: click.Context) -> str:
    """The words that name a command after `llmconv`, such as `delta apply`; also of a context without parents."""
    names = [ctx.info_name or ""]
    while ctx.parent is not None:
        ctx = ctx.parent
        names.append(ctx.info_name or "")
    return " ".join(reversed(names[:-1] if len(names) > 1 else names))


def heading_of(command: str, parameter: str) -> str:
    """The heading above an option, from the path of the command and the Python name of the parameter."""
    if own := OWN.get(command, {}).get(parameter):
        return own
    return next((heading for heading, names in COMMON.items() if parameter in names.split()), OTHER)


class Command(click.Command):
    """A command whose help has examples, and headings above many options."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click's, whose parser names no context for an option without its value."""
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            error.ctx = error.ctx or ctx
            raise

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the examples, and the options below headings in the order of `COMMON`."""
        _write_examples(path_of(ctx), formatter)
        rows: dict[str, list[tuple[str, str]]] = {heading: [] for heading in (OTHER, *COMMON)}
        named = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        shown = [(param, record) for param in named if (record := param.get_help_record(ctx))]
        for param, record in shown:
            name = "help" if param in (self.get_help_option(ctx),) else param.name or ""
            rows[heading_of(path_of(ctx), name) if len(shown) > MANY else OTHER].append(record)
        for heading, records in rows.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)


class Group(click.Group):
    """A group whose help lists its commands, each with the whole first sentence of its help."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The commands in the order of the work, not of the alphabet."""
        return list(self.commands)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the commands under headings, where click has one list of sentences that it cuts."""
        for heading, names in (SECTIONS if ctx.parent is None else {"Commands": tuple(self.commands)}).items():
            with formatter.section(heading):
                first = {name: (self.commands[name].help or "").split("\n\n")[0] for name in names}
                formatter.write_dl([(name, " ".join(text.split()).removesuffix(".")) for name, text in first.items()])


@cache
def examples() -> dict[str, list[tuple[str, str]]]:
    """Lines to copy, by command, each with a note; empty for none."""
    texts = tomllib.loads((resources.files(__package__) / "examples.toml").read_text("utf-8"))
    return {
        name: [(line, note) for line, _, note in (row.partition("  # ") for row in text.splitlines())]
        for name, text in texts.items()
    }


def _write_examples(command: str, formatter: click.HelpFormatter) -> None:
    if not (lines := examples().get(command)):
        return
    width = max((len(line) for line, note in lines if note), default=0)
    with formatter.section("Examples"):
        indent = " " * formatter.current_indent
        fits = all(len(indent) + width + 4 + len(note) <= formatter.width for _, note in lines)
        for line, note in lines:
            if not note:
                formatter.write(f"{indent}{line}\n")
            else:
                formatter.write(
                    f"{indent}{line:{width}}  # {note}\n" if fits else f"{indent}{line}\n{indent}    # {note}\n"
                )


BUG_EXIT_CODE = 70  # exit code of an unexpected error, a bug: `EX_SOFTWARE` of sysexits.h
MEMORY_HINT = (
    "close other programs, or use smaller batches or shorter lengths; `llmconv verify --low-memory` needs less"
)
INTERRUPTED_HINT = "run the same command again"
RESUME_HINT = f"{INTERRUPTED_HINT}; `--resume` keeps the files that this one has finished"
# commands that only print: if the reader of stdout closes early (`| head`), their exit code is still 0
PRINT_ONLY = ("inspect", "formats", "families", "doctor")
REPORTS_VERSIONS = "doctor"
EARLY = "_interrupted"  # name of the function in `__main__.py` that ends the program on Ctrl-C before a command begins
HELP = {"-h", "--help"}
READER_LEFT = 141  # exit code of the other commands if the reader of stdout closes early: 128 + SIGPIPE, as in shells
# imports and traces make millions of long-lived objects: by default, garbage collection took 6 % of an export
GC_THRESHOLDS = (100_000, 50, 100)


class Terminated(KeyboardInterrupt):
    """SIGTERM, which schedulers send before SIGKILL."""


def _terminated(number: int, frame: FrameType | None) -> None:
    raise Terminated


def _take_signals() -> None:
    """From here on a signal is an exception: a command may have something to undo."""
    signal.signal(signal.SIGTERM, _terminated)
    if getattr(signal.getsignal(signal.SIGINT), "__name__", "") == EARLY:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class Commands(UserDict[str, click.Command]):
    """The commands by name, in the order of the work; each module is imported when its command is first asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.names = [name for names in SECTIONS.values() for name in names]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __missing__(self, name: str) -> click.Command:
        if name not in self.names:
            raise KeyError(name)
        self[name] = refuse_empty_paths(import_module(f"llmconv.cli.{name.replace('-', '_')}").command)
        return self[name]


class CommandGroup(Group):
    """The group of all commands: what they share in errors, signals and standard streams."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = Commands()

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """As click's; `help COMMAND` is `COMMAND --help`; wrong options of the group are reported like a command's."""
        if args[:1] == ["help"]:
            args = [*args[1:], "--help"]
        try:
            return super().make_context(info_name, args, parent, **extra)
        except BrokenPipeError as error:  # of `--version` and `--help`
            _discard_stdout()
            raise click.exceptions.Exit(0) from error
        except click.UsageError as error:
            self._fail_usage(error)

    def main(self, *args: Any, **extra: Any) -> Any:
        """As click's; closed standard streams go to the null device, and a failed write is reported."""
        # opens closed standard streams on the null device: an output file would get their number, and so messages
        for number, name in enumerate(("stdin", "stdout", "stderr")):
            try:
                os.fstat(number)
            except OSError:
                os.open(os.devnull, os.O_RDWR)  # takes the lowest free number: this one
            if getattr(sys, name) is None:
                setattr(sys, name, open(os.devnull, "w" if number else "r", encoding="utf-8"))  # noqa: SIM115 - it stays open
        try:
            return super().main(*args, **extra)
        except OSError as error:  # of `--version` and `--help`, which print before a command is invoked
            _print_error(
                f"writing failed: {error.strerror or error} (stdout)", "make sure that there is space on the disk"
            )
            sys.exit(OutputFailed.exit_code)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """As click's; checks the version of transformers first, for all commands but the one that reports it."""
        if args[0] != REPORTS_VERSIONS and not {*args} & HELP:
            require_transformers()
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command; an error is printed as message, blank line and hint, and gives its exit code."""
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")  # by default its threads busy-wait for a while
        gc.set_threshold(*GC_THRESHOLDS)
        _take_signals()
        end_if_hung(partial(_print_error, "interrupted, and the store does not answer", RESUME_HINT))
        asks_help = bool({*ctx.args} & HELP)
        try:
            require_platform()
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except LlmconvError as error:
            self._fail(ctx, error.message, self._with_owners(ctx, error.hint), error.exit_code)
        except KeyboardInterrupt as interrupt:
            code = 143 if isinstance(interrupt, Terminated) else 130
            keeps = KEPT in getattr(interrupt, "__notes__", ())
            self._fail(ctx, "interrupted", RESUME_HINT if keeps else INTERRUPTED_HINT, code)
        except BrokenPipeError:
            _discard_stdout()
            ctx.exit(0 if asks_help or ctx.invoked_subcommand in PRINT_ONLY else READER_LEFT)
        except click.UsageError as error:
            self._fail_usage(error)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except OSError as error:
            problem = f"reading or writing failed: {error.strerror or error} ({error.filename or 'stdout'})"
            self._fail(ctx, problem, "check the free disk space, and that the files are readable and writable", 4)
        except Exception as error:  # a bug: never exit code 1, which means a difference
            if is_out_of_memory(error):
                self._fail(ctx, "out of memory", MEMORY_HINT, OutputFailed.exit_code)
            if isinstance(error, ImportError) and (unusable := unusable_package(error)):
                self._fail(ctx, unusable.message, unusable.hint, unusable.exit_code)
            self._fail(ctx, *_bug(ctx, error), BUG_EXIT_CODE)

    def _with_owners(self, ctx: click.Context, hint: str) -> str:
        """A hint that says of which command an option is, if not of this one or of one that the hint names."""
        words = [ctx.invoked_subcommand or "", *(match[1] for match in COMMAND.finditer(hint))]
        here = {spelling for word in words for spelling in self._spellings(word)}
        foreign = [found[1] for found in BARE_OPTION.finditer(hint) if found[1] not in here]
        for option in dict.fromkeys(foreign):
            owner = next((name for name in OWNERS if option in self._spellings(name)), None)
            if owner and not re.search(rf"\b{owner}(?:ed)?\b", hint):
                hint += f"; `{option}` is an option of `llmconv {owner}`"
        return hint

    def _spellings(self, name: str) -> set[str]:
        """The options of a command, or of all commands of a group; empty for no command."""
        found = self.commands.get(name)
        below = [*found.commands.values()] if isinstance(found, click.Group) else [found] if found else []
        return {spelling for one in below for param in one.params for spelling in (*param.opts, *param.secondary_opts)}

    def _fail_usage(self, error: click.UsageError) -> NoReturn:
        """Reports click's errors of arguments like every other error; without any argument click shows the help."""
        if error.ctx is None or isinstance(error, click.exceptions.NoArgsIsHelpError):
            raise error
        message, command, path = usage_line(error.format_message()), error.ctx.command, error.ctx.command_path
        hint = f"see `{path} --help`"
        if isinstance(error, click.NoSuchOption):
            ours = [spelling for one in command.params for spelling in one.opts]
            if known := hint_for(error.ctx.info_name or "", error.option_name, ours):
                message, hint = f"no such option `{error.option_name}`", f"{known}; {hint}"
        elif isinstance(error, click.BadParameter) and (known := hint_for_value(message)):
            hint = f"{known}; {hint}"
        elif found := NO_COMMAND.match(message):
            meant = _words()["commands"].get(found[1])
            if meant in getattr(command, "commands", {}):
                message, hint = found[0], f"did you mean `{path} {meant}`? {hint}"
        problem = UsageProblem(message, hint=hint)
        self._fail(error.ctx, problem.message, problem.hint, problem.exit_code)

    def _fail(self, ctx: click.Context, message: str, hint: str, exit_code: int) -> NoReturn:
        if ctx.meta.get(VERBOSE):
            traceback.print_exc()
        for made, given in ctx.meta.get(MADE, {}).items():
            message, hint = message.replace(made, given), hint.replace(made, given)
        _print_error(message, hint)
        ctx.exit(exit_code)


def _print_error(message: str, hint: str) -> None:
    """Prints to stderr. If that fails, the exit code alone reports the error: it must not become 1, a difference."""
    with suppress(OSError):
        status("")
        click.echo(f"error: {message}\n\nhint: {hint}", err=True)


def _discard_stdout() -> None:
    """Sends the rest of the buffer to the null device, or Python reports the closed pipe again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _bug(ctx: click.Context, error: Exception) -> tuple[str, str]:
    """The message of a bug (version, command, error and where it was raised) and its hint."""
    command = " ".join(filter(None, (ctx.command_path, ctx.invoked_subcommand)))
    frame = traceback.extract_tb(error.__traceback__)[-1:]
    place = f" ({Path(frame[0].filename).name}:{frame[0].lineno})" if frame else ""
    line = f"llmconv {__version__} has a bug: {command}: {type(error).__name__}: {first_line(error)}{place}"
    return printable(line), "report this line and the command that you ran; `-v` shows the traceback"


COMMAND, BARE_OPTION = re.compile(r"`llmconv ([\w-]+)"), re.compile(r"`(-o|--[a-z][\w-]*)[ =`]")
OWNERS = ("to-hf", "merge-lora", "export", "quantize", "onnx-adapter", "verify", "generate")
NO_COMMAND = re.compile("no such command `([^`]*)`")


@cache
def _words() -> dict[str, Any]:
    """Names of commands, values and options in other programs, and ours."""
    return tomllib.loads((resources.files(__package__) / "other_programs.toml").read_text("utf-8"))


@cache
def hints() -> dict[tuple[str, str], str]:
    """Command and option of another program to the hint."""
    return {
        (name, option): hint.replace("{name}", name)
        for names, options, hint in _words()["options"]
        for name in names.split()
        for option in options.split()
    }


def hint_for(command: str, option: str, known: Iterable[str] = ()) -> str:
    """The hint for an `option` that a command does not have, next to its `known` ones; empty for the help alone."""
    dashed, under = option.replace("_", "-"), "--" + option.removeprefix("--").replace("-", "_")
    if dashed != option and dashed in {*known}:
        return hints().get((command, option), f"`{dashed}`")
    return hints().get((command, option)) or hints().get((command, under), "")


def hint_for_value(message: str) -> str:
    """The hint for a refused option value (in backticks in `message`) that another program accepts; empty if none."""
    values = _words()["values"].items()
    return next((f"here it is {ours}" for value, ours in values if f": `{value}` is not" in message), "")


@group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"]})
@version_option(__version__, "-V", "--version", prog_name="llmconv")
def main() -> None:
    """From a training checkpoint to verified ONNX graphs.

    Exit codes: 0 success, 1 a difference was found, 2 usage error, 3 input refused,
    4 I/O or a stage on another host failed (safe to --resume), 5 nothing could be compared, 70 a bug of llmconv,
    130 interrupted and 143 terminated (--resume continues).
    """
