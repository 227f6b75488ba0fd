"""llmconv generate: prompts in, text out."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from llmconv.cli import options
from llmconv.progress import say

if TYPE_CHECKING:
    from llmconv.generation import Generation


@click.command("generate")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--prompt", "prompts", multiple=True, required=True, help="Text to continue; may be repeated.")
@click.option("--backend", type=click.Choice(["onnx", "torch"]), default="onnx", show_default=True, help="What runs.")
@click.option("--max-new-tokens", type=click.IntRange(1), default=64, show_default=True, help="At most so many.")
@click.option("--temperature", type=click.FloatRange(0), default=0.0, show_default=True, help="0 is greedy.")
@click.option("--top-k", type=click.IntRange(0), default=0, show_default=True, help="Keep the k likeliest; 0 for all.")
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), default=1.0, show_default=True, help="Nucleus.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of the sampling.")
@click.option("--stream", is_flag=True, help="Print the text while it grows.")
@click.option("--threads", type=click.IntRange(0), default=0, help="Of onnxruntime; 0 for one per core.")
@options.trust_remote_code
@options.as_json
@options.talk
def command(
    folder: Path,
    prompts: tuple[str, ...],
    backend: str,
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    stream: bool,
    threads: int,
    trust_remote_code: bool,
    as_json: bool,
) -> None:
    """Continue prompts with the graphs in FOLDER, or with its eager model.

    The new text goes to stdout, tokens per second to stderr.
    """
    from llmconv.generation import Piece, generate
    from llmconv.generation.streaming import OrderedWriter
    from llmconv.runtime import SessionSettings

    def write(piece: str) -> None:
        sys.stdout.write(piece)
        sys.stdout.flush()

    writer = OrderedWriter(len(prompts), write)

    def on_piece(piece: Piece) -> None:
        writer.push(piece.index, piece.text, bool(piece.finish))

    streaming = stream and not as_json
    result = generate(
        folder,
        prompts,
        backend=backend,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        do_sample=temperature > 0,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        session=SessionSettings(threads=threads),
        on_piece=on_piece if streaming else None,
        trust_remote_code=trust_remote_code,
    )
    if as_json:
        options.print_json(_as_dict(result))
    elif not streaming:
        for completion in result.completions:
            click.echo(completion.text)
    say(_speed(result))


def _as_dict(result: Generation) -> dict[str, object]:
    return {
        "backend": result.backend,
        "completions": [asdict(completion) for completion in result.completions],
        "batches": [cost.as_dict() for cost in result.batches],
        **result.total.as_dict(),
    }


def _speed(result: Generation) -> str:
    total = result.total
    prompt = f"prompt: {total.prompt_tokens} tokens, {total.prompt_rate:.1f} tokens/s"
    return f"{prompt}; generation: {total.new_tokens} tokens, {total.rate:.1f} tokens/s"
