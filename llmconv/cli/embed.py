"""`llmconv embed`."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from llmconv.cli import generation_options, options
from llmconv.cli.file_names import refuse_file_name
from llmconv.errors import InputRefused, OutputFailed, UsageProblem
from llmconv.files.output_parents import require_parents


@click.command("embed")
@click.argument("model", metavar="FOLDER")
@click.argument("texts", metavar="[TEXT]...", nargs=-1)
@click.option("--text-file", metavar="FILE", help="File with one text per line; - for standard input.")
@click.option("--prompt-name", metavar="NAME", help="The model's own prompt to put in front, such as query.")
@click.option("--batch-size", type=click.IntRange(1), default=8, show_default=True, help="Number of texts per run.")
@click.option(
    "--output-file", type=options.Output(), metavar="FILE", help="Write a .npy array, or JSON lines, instead of stdout."
)
@click.option("--overwrite", is_flag=True, help="Replace the output file.")
@generation_options.session
@options.as_json
@options.talk
def command(
    model: str,
    texts: tuple[str, ...],
    text_file: str | None,
    prompt_name: str | None,
    batch_size: int,
    output_file: Path | None,
    overwrite: bool,
    as_json: bool,
    **given: Any,
) -> None:
    """Print the embedding of each text.

    FOLDER has the graph that `llmconv export --task` wrote. Each line of the output is a JSON object with `text` and
    `embedding`; with a classifier `logits` of its classes, with a reranker `score`. A .npy file has one row per text,
    in float32.
    """
    from llmconv.embedding.embedder import RESULTS, Embedder

    if as_json and output_file:
        raise UsageProblem("`--json` prints to stdout, and `--output-file` writes a file", hint="give one of them")
    _require_free(output_file, text_file, overwrite=overwrite)
    given_texts = _texts(texts, text_file)
    embedder = Embedder(model, generation_options.session_settings(given))
    found = embedder.encode(given_texts, prompt_name, batch_size)
    if output_file and output_file.suffix == ".npy":
        import numpy as np

        stream = io.BytesIO()
        np.save(stream, found, allow_pickle=False)
        _write(output_file, stream.getvalue())
        return
    name = RESULTS[embedder.role]
    rows = [{"text": text, name: row.tolist()} for text, row in zip(given_texts, found, strict=True)]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    if as_json:
        options.print_json({"role": embedder.role, "results": rows})
    elif output_file:
        _write(output_file, lines.encode())
    else:
        click.echo(lines, nl=False)


def _require_free(output: Path | None, text_file: str | None, *, overwrite: bool) -> None:
    """Refuses an output file that exists, or whose texts would be lost.

    Raises:
        UsageProblem: `--overwrite` without an output file, or an output file that is the text file.
        InputRefused: the file exists, or is below a file.
    """
    if output is None:
        if overwrite:
            raise UsageProblem("`--overwrite` needs `--output-file`", hint="leave it out")
        return
    if text_file and text_file != "-" and Path(text_file).resolve() == output.resolve():
        raise UsageProblem("`--output-file` is the same file as `--text-file`", hint="give another one")
    if output.exists() and not overwrite:
        raise InputRefused(f"`{output}` exists", hint="give another file, or `--overwrite`")
    require_parents(output)


def _texts(texts: Sequence[str], file: str | None) -> list[str]:
    """Texts of the command line, or of a file without its empty lines.

    Raises:
        UsageProblem: none, or both.
        InputRefused: the file cannot be read, or has no text.
    """
    if texts and file:
        raise UsageProblem("texts are given both as arguments and in a file", hint="give only one of them")
    for text in texts:
        refuse_file_name(text, "text", "--text-file")
    if texts:
        return list(texts)
    if not file:
        raise UsageProblem("no text is given", hint="give one after the folder, or `--text-file`")
    try:
        content = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not valid UTF-8"
        raise InputRefused(f"the texts in `{file}` cannot be read: {reason}", hint="give a text file") from error
    lines = [line.rstrip("\r") for line in content.split("\n") if line.strip()]
    if not lines:
        raise InputRefused(f"`{file}` has no text", hint="write one text per line")
    return lines


def _write(path: Path, content: bytes) -> None:
    """Writes the file in one step.

    Raises:
        OutputFailed: writing failed.
    """
    from llmconv.files.named_file import replace_file

    try:
        replace_file(path, content)
    except OSError as error:
        raise OutputFailed(
            f"`{path}` cannot be written: {error.strerror or error}", hint="check the folder and the free disk space"
        ) from error
