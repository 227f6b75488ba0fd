"""The command line: each command is one small file that parses, calls the library and prints."""

from __future__ import annotations

import gc
import importlib
import os
import re
import signal
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import click

from llmconv import __version__
from llmconv.cli.options import VERBOSE, refuse_empty_paths
from llmconv.errors import LlmconvError, OutputFailed, UsageProblem, first_line, printable
from llmconv.memory import is_out_of_memory
from llmconv.requirements import require_platform, require_transformers

DEFECT = 70
"""Exit code of an error that llmconv did not foresee: `EX_SOFTWARE` of sysexits.h."""

MEMORY = "end other programs, or take smaller batches, shorter lengths or, in `verify`, `--low-memory`"
INTERRUPTED = "run the same command again; where it has `--resume`, that keeps what was finished"

COMMANDS = (
    "inspect",
    "to-hf",
    "from-hf",
    "merge-lora",
    "delta",
    "export",
    "verify",
    "generate",
    "chat",
    "serve",
    "bench",
    "formats",
    "families",
)

SHOWING = ("inspect", "formats", "families")
"""Commands that only show: a reader who leaves early has seen what there was to see, so their exit code stays 0."""

READER_LEFT = 141
"""Exit code of the other commands where the reader of stdout leaves: 128 + SIGPIPE, as shells have it."""

COLLECT_SELDOM = (100_000, 50, 100)
"""Imports and traces make millions of objects that stay: looking through them by default took 6 % of an export."""


class Terminated(KeyboardInterrupt):
    """SIGTERM, as a scheduler sends it before it kills."""


def _terminated(number: int, frame: FrameType | None) -> None:
    raise Terminated


class LazyGroup(click.Group):
    """Finds a command by its file name; torch and friends load only when the command runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The commands in the order of the work."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The object `command` of `llmconv/cli/<name>.py`."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"llmconv.cli.{cmd_name.replace('-', '_')}").command
        return refuse_empty_paths(command)

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """As click's; options of the group itself are refused as those of its commands are."""
        try:
            return super().make_context(info_name, args, parent, **extra)
        except BrokenPipeError as error:  # of `--version` and `--help`
            _discard_stdout()
            raise click.exceptions.Exit(0) from error
        except click.UsageError as error:
            self._fail_usage(error)

    def main(self, *args: Any, **extra: Any) -> Any:
        """As click's; closed standard streams lead to the null device, and a full one is reported."""
        _open_closed_streams()
        try:
            return super().main(*args, **extra)
        except OSError as error:  # of `--version` and `--help`, which print before a command is invoked
            _say_error(f"writing failed: {error.strerror or error} (stdout)", "see that there is space")
            sys.exit(OutputFailed.exit_code)

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command; an error becomes message, blank line, hint and its exit code."""
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")  # by default its threads spin before they sleep
        gc.set_threshold(*COLLECT_SELDOM)
        signal.signal(signal.SIGTERM, _terminated)
        asks_help = bool({*ctx.args} & {"-h", "--help"})
        try:
            require_platform()
            if not asks_help:
                require_transformers()
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except LlmconvError as error:
            self._fail(ctx, error.message, error.hint, error.exit_code)
        except KeyboardInterrupt as interrupt:
            code = 143 if isinstance(interrupt, Terminated) else 130
            self._fail(ctx, "interrupted", INTERRUPTED, code)
        except BrokenPipeError:
            _discard_stdout()
            ctx.exit(0 if asks_help or ctx.invoked_subcommand in SHOWING else READER_LEFT)
        except click.UsageError as error:
            self._fail_usage(error)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except OSError as error:
            problem = f"reading or writing failed: {error.strerror or error} ({error.filename or 'stdout'})"
            self._fail(ctx, problem, "see that there is space, and that files can be read and written", 4)
        except Exception as error:  # a defect of ours or of a library: never exit code 1, which means a difference
            if is_out_of_memory(error):
                self._fail(ctx, "out of memory", MEMORY, OutputFailed.exit_code)
            self._fail(ctx, *_defect(ctx, error), DEFECT)

    def _fail_usage(self, error: click.UsageError) -> NoReturn:
        """What click says of arguments, in the form of every other error; where none are given it shows the help."""
        if error.ctx is None or isinstance(error, click.exceptions.NoArgsIsHelpError):
            raise error
        message = re.sub(r"'([^']+)'", r"`\1`", " ".join(error.format_message().split()).replace(". (", " ("))
        problem = UsageProblem(message[:1].lower() + message[1:], hint=f"see `{error.ctx.command_path} --help`")
        self._fail(error.ctx, problem.message, problem.hint, problem.exit_code)

    def _fail(self, ctx: click.Context, message: str, hint: str, exit_code: int) -> NoReturn:
        if ctx.meta.get(VERBOSE):
            traceback.print_exc()
        _say_error(message, hint)
        ctx.exit(exit_code)


def _say_error(message: str, hint: str) -> None:
    """On stderr; where that is full the exit code alone tells, which must not become 1, a difference."""
    with suppress(OSError):
        click.echo(f"error: {message}\n\nhint: {hint}", err=True)


def _discard_stdout() -> None:
    """Sends what is left in the buffer nowhere, or Python complains once more at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _open_closed_streams() -> None:
    """Gives closed standard streams to the null device: else an output file takes their numbers, and messages."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w" if number else "r", encoding="utf-8"))  # noqa: SIM115 - it stays


def _defect(ctx: click.Context, error: Exception) -> tuple[str, str]:
    """The line to report (version, command, error and where it was raised) and what to do with it."""
    command = " ".join(filter(None, (ctx.command_path, ctx.invoked_subcommand)))
    frame = traceback.extract_tb(error.__traceback__)[-1:]
    place = f" ({Path(frame[0].filename).name}:{frame[0].lineno})" if frame else ""
    line = f"llmconv {__version__} has a defect: {command}: {type(error).__name__}: {first_line(error)}{place}"
    return printable(line), "report this line with the command that you gave; `-v` shows where it comes from"


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="llmconv")
def main() -> None:
    """From a training checkpoint to verified ONNX graphs.

    \b
    llmconv to-hf      SOURCE -o OUT           training checkpoint -> Hugging Face folder
    llmconv from-hf    MODEL -o OUT --to KIND  Hugging Face folder -> training checkpoint
    llmconv merge-lora BASE ADAPTER -o OUT     adapters merged into the weights
    llmconv delta apply BASE DELTA -o OUT      delta weights added; `delta extract` makes them
    llmconv export     MODEL                   prefill and decode graphs beside the weights they map
    llmconv verify     MODEL                   graphs against the eager model
    llmconv generate   MODEL --prompt TEXT     text from the graphs
    llmconv chat       MODEL                   a conversation in the terminal
    llmconv serve      MODEL                   OpenAI's API and a chat page on localhost
    llmconv bench      MODEL --against OTHER   how fast they are

    Exit codes: 0 done and true, 1 a difference was found, 2 usage, 3 input refused,
    4 I/O failed (safe to --resume), 5 nothing could be compared, 70 a defect of llmconv,
    130 interrupted and 143 terminated (--resume goes on).
    """
