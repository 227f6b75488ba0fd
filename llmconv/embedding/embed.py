"""`embed`: the embeddings of texts, of the command line or a file, returned or written into a file."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from llmconv.argument_checks import checked
from llmconv.embedding.embedder import RESULTS, Embedder
from llmconv.errors import InputRefused, OutputFailed, UsageProblem
from llmconv.files.paths import Written
from llmconv.files.safe_folder import replace_file, require_parents
from llmconv.runtime.onnxruntime.session_file import SessionOptions, session_settings
from llmconv.tensors import Array


@dataclass(frozen=True)
class Embedded:
    """The results of several texts.

    Attributes:
        role: `embed`, `classify` or `rerank`.
        texts: the texts, in order.
        values: float32 [texts, features] of embeddings, [texts, labels] of a classifier, or [texts] of a reranker.
    """

    role: str
    texts: list[str]
    values: Array

    def rows(self) -> list[dict[str, Any]]:
        """A JSON object for each text: `text`, and `embedding`, `logits` or `score`."""
        name = RESULTS[self.role]
        return [{"text": text, name: row.tolist()} for text, row in zip(self.texts, self.values, strict=True)]

    def lines(self) -> str:
        """The same as JSON lines."""
        return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in self.rows())

    def content(self, path: Path) -> bytes:
        """The content of a file: an array in `.npy`, otherwise JSON lines.

        Args:
            path: of the file.
        """
        if path.suffix != ".npy":
            return self.lines().encode()
        stream = io.BytesIO()
        np.save(stream, self.values, allow_pickle=False)
        return stream.getvalue()


@checked
def embed(
    model: str | Path,
    texts: Sequence[str] = (),
    *,
    text_file: str | Path | None = None,
    prompt_name: str | None = None,
    batch_size: int = 8,
    output_file: Written | None = None,
    overwrite: bool = False,
    **options: Unpack[SessionOptions],
) -> Embedded:
    """Embeds texts; of a classifier the logits, of a reranker the scores.

    Args:
        model: a folder that `llmconv export --task` wrote.
        texts: the texts, or a single one; for a reranker the whole prompts.
        text_file: a file with one text per line, in place of `texts`; `-` for standard input.
        prompt_name: name of the model's own prompt in front of each text; None for its default.
        batch_size: number of texts per run.
        output_file: a `.npy` file, or one of JSON lines, to write the results into.
        overwrite: replace that file.
        options: how onnxruntime runs the graph.

    Raises:
        InputRefused: the folder has no such graph, a text has no tokens, a file cannot be read, or the output exists.
        OutputFailed: the output cannot be written.
        UsageProblem: no text, texts twice, or the model has no such prompt.
    """
    output, file = (None if one is None else str(one) for one in (output_file, text_file))
    path = Path(output) if output else None
    _require_free(path, file, overwrite=overwrite)
    given = _texts([texts] if isinstance(texts, str) else texts, file)
    embedder = Embedder(model, session_settings(options))
    found = Embedded(embedder.role, given, embedder.encode(given, prompt_name, batch_size))
    if path:
        _write(path, found.content(path))
    return found


def _require_free(output: Path | None, text_file: str | None, *, overwrite: bool) -> None:
    """Refuses an output file that exists, or whose texts would be lost; raises InputRefused or UsageProblem."""
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
    """Texts of the command line, or of a file without its empty lines; raises UsageProblem for none, or both."""
    if texts and file:
        raise UsageProblem("texts are given both as arguments and in a file", hint="give only one of them")
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
    """Writes the file in one step; raises OutputFailed."""
    try:
        replace_file(path, content)
    except OSError as error:
        raise OutputFailed(
            f"`{path}` cannot be written: {error.strerror or error}", hint="check the folder and the free disk space"
        ) from error
