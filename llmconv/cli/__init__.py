"""The command line: each command is one small file that parses, calls the library and prints."""

from __future__ import annotations

import click

from llmconv.cli import (
    bench,
    chat,
    clean,
    delta,
    doctor,
    embed,
    export,
    families,
    formats,
    from_hf,
    generate,
    inspect,
    merge_lora,
    onnx_adapter,
    push,
    run,
    serve,
    serve_stage,
    to_hf,
    verify,
)
from llmconv.cli.command_group import CommandGroup
from llmconv.version import __version__


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "-V", "--version", prog_name="llmconv")
def main() -> None:
    """From a training checkpoint to verified ONNX graphs.

    Exit codes: 0 success, 1 a difference was found, 2 usage error, 3 input refused,
    4 I/O or a stage on another host failed (safe to --resume), 5 nothing could be compared, 70 a bug of llmconv,
    130 interrupted and 143 terminated (--resume continues).
    """


MODULES = (
    *(inspect, to_hf, from_hf, merge_lora, delta, export, onnx_adapter, verify, push, run),
    *(generate, embed, chat, serve, serve_stage, bench, clean, formats, families, doctor),
)
"""In the order of the work."""

for module in MODULES:
    main.add_command(module.command)
