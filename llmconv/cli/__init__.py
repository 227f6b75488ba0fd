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

    \b
    llmconv to-hf      SOURCE -o OUT           training checkpoint -> Hugging Face folder
    llmconv from-hf    MODEL -o OUT --to KIND  Hugging Face folder -> training checkpoint
    llmconv merge-lora BASE ADAPTER -o OUT     merge adapters into the weights
    llmconv delta apply BASE DELTA -o OUT      add delta weights; `delta extract` makes them
    llmconv export     MODEL                   prefill and decode graphs next to the weights they map
    llmconv onnx-adapter MODEL ADAPTER -o FILE LoRA factors for graphs that take them as inputs
    llmconv verify     MODEL                   compare the graphs with the eager model
    llmconv push       FOLDER ORG/NAME         upload to the Hugging Face Hub, as one commit
    llmconv run        FILE                    do the steps above that a YAML file lists, if they are not done
    llmconv generate   MODEL --prompt TEXT     continue a prompt with the graphs
    llmconv embed      MODEL TEXT...           embeddings, classes or scores of texts
    llmconv chat       MODEL                   chat in the terminal
    llmconv serve      MODEL                   OpenAI's API and a chat page on localhost
    llmconv serve-stage FOLDER --stage I       run some of the layers for models on other hosts
    llmconv bench      MODEL --against OTHER   measure how fast they are
    llmconv clean      URI                     delete what an interrupted run left in an object store

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
