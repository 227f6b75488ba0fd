"""`optimum-cli export llmconv`.

optimum imports the modules of this namespace package, which must have no `__init__.py`.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from typing import Any

import click
from optimum.commands.base import BaseOptimumCLICommand, CommandInfo
from optimum.commands.export.base import ExportCommand

from llmconv.cli import main as llmconv

EXPORT = llmconv.commands["export"]
OPTIONS = {str(one.name): one for one in EXPORT.params if isinstance(one, click.Option) and one.name != "output"}


class LlmconvExportCommand(BaseOptimumCLICommand):  # type: ignore[misc]
    """The command; its options are those of `llmconv export`."""

    COMMAND = CommandInfo(name="llmconv", help="ONNX graphs that share one set of weights, with llmconv.")

    @staticmethod
    def parse_args(parser: ArgumentParser) -> None:
        """Adds the arguments. Values are checked by `llmconv export` itself."""
        parser.description = EXPORT.get_short_help_str(200)
        parser.allow_abbrev = False  # as `llmconv export`, which gets the options
        parser.add_argument("model", metavar="MODEL", help="Hugging Face folder.")
        parser.add_argument("output", metavar="OUT", nargs="?", help="New folder; by default graphs go into MODEL.")
        for name, option in OPTIONS.items():
            action: dict[str, Any] = {"action": "store_true"} if option.is_flag else {"metavar": _metavar(option)}
            if option.multiple:
                action["action"] = "append"
            text = (option.help or "").replace("%", "%%")
            parser.add_argument(*option.opts, dest=name, help=text, **action)

    def run(self) -> None:
        """Runs `llmconv export`, and ends with its exit code."""
        llmconv.main(["export", *_words(self.args)], prog_name="llmconv")


def _metavar(option: click.Option) -> str:
    return option.metavar or str(option.name).upper()


def _words(given: Namespace) -> Iterator[str]:
    """The command line of `llmconv export`."""
    for name, option in OPTIONS.items():
        value = getattr(given, name)
        spelled = max(option.opts, key=len)
        if option.is_flag:
            yield from [spelled] * bool(value)
        else:
            yield from (
                f"{spelled}={one}" for one in (value if isinstance(value, list) else [value]) if one is not None
            )
    if given.output is not None:
        yield f"--output={given.output}"
    yield from ("--", given.model)


REGISTER_COMMANDS = [(LlmconvExportCommand, ExportCommand)]
