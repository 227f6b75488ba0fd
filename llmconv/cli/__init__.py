"""The command line: each command is one small file that parses, calls the library and prints."""

from __future__ import annotations

from importlib import import_module

from click import group, version_option

from llmconv.cli.command_group import CommandGroup
from llmconv.cli.help_page import SECTIONS
from llmconv.version import __version__


@group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"]})
@version_option(__version__, "-V", "--version", prog_name="llmconv")
def main() -> None:
    """From a training checkpoint to verified ONNX graphs.

    Exit codes: 0 success, 1 a difference was found, 2 usage error, 3 input refused,
    4 I/O or a stage on another host failed (safe to --resume), 5 nothing could be compared, 70 a bug of llmconv,
    130 interrupted and 143 terminated (--resume continues).
    """


for name in (name for names in SECTIONS.values() for name in names):
    main.add_command(import_module(f"llmconv.cli.{name.replace('-', '_')}").command)
