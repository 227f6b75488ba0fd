"""CompletionFile: one line of JSON per prompt, in their order; a run that was killed goes on behind them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, BinaryIO

from llmconv.errors import InputRefused, OutputFailed
from llmconv.folder import Folder, require_plain
from llmconv.generation.prompts import Prompt
from llmconv.generation.report import Completion
from llmconv.paths import Written, output_path
from llmconv.streaming import write_fully

SIDE_FILE = ".{}.options.json"
"""Hidden beside the file: what its lines are made with."""


class CompletionFile:
    """Lines of JSON, appended batch by batch.

    Every line has the fields that came with the prompt, such as an `id`, and `prompt` or `messages`, `text`, `tokens`,
    `prompt_tokens` and `finish`. What the file is made with lies hidden beside it, so that a run with other prompts or
    options is refused.

    Args:
        path: of the file.
        prompts: all of them, in order.
        options: all that the text depends on.
        overwrite: start afresh, whatever is there.

    Raises:
        InputRefused: the file is of other prompts or options, or no file of completions.
        OutputFailed: it cannot be written.
    """

    def __init__(
        self, path: Written, prompts: Sequence[Prompt], options: Mapping[str, Any], *, overwrite: bool = False
    ) -> None:
        path = output_path(path, "--output-file")
        self._path, self._side = path, path.with_name(SIDE_FILE.format(path.name))
        made_with = {"prompts": _digest(prompts), "count": len(prompts), "options": dict(options)}
        self._made_with = json.dumps(made_with, sort_keys=True, default=_plain)
        self._fields = [prompt.fields for prompt in prompts]
        if path.exists() and not path.is_file():
            raise InputRefused(
                f"`{path}` is no file", hint="give another `--output-file`; text goes to stdout without it"
            )
        if overwrite:
            self._remove()
        require_plain(path)
        self.done, self._size = self._finished(prompts)
        self._file = self._open()

    def write(self, completions: Sequence[Completion]) -> None:
        """Appends a batch; it is on the disk when this returns.

        Raises:
            OutputFailed: it cannot be written.
        """
        given = self._fields[self.done : self.done + len(completions)]
        made = [{**fields, **_as_dict(one)} for fields, one in zip(given, completions, strict=True)]
        lines = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in made)
        try:
            write_fully(self._file.fileno(), memoryview(lines.encode("utf-8", errors="surrogatepass")))
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._failed(error) from error
        self.done += len(completions)

    def __enter__(self) -> CompletionFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def _finished(self, prompts: Sequence[Prompt]) -> tuple[int, int]:
        """Lines that are whole, and their bytes."""
        if not self._path.exists():
            return 0, 0
        content = self._path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        lines = whole.splitlines()
        if not content:
            return 0, 0
        if not self._side.is_file():
            self._refuse("is there already, and nothing tells how it was made")
        if self._side.read_bytes() != self._made_with.encode():
            self._refuse("was begun with other prompts or options, or another model")
        for line, prompt in zip(lines, prompts, strict=False):
            if _prompt_of(line) != prompt.content:
                self._refuse("holds other prompts")
        if len(lines) > len(prompts):
            self._refuse("holds more lines than there are prompts")
        return len(lines), len(whole)

    def _open(self) -> BinaryIO:
        try:
            with Folder.open(self._path.parent) as folder:
                folder.write(self._side.name, self._made_with.encode())
                file = folder.open_to_append(self._path.name)
            file.truncate(self._size)  # half a line of a run that was killed
        except OSError as error:
            raise self._failed(error) from error
        return file

    def _remove(self) -> None:
        for path in (self._path, self._side):
            path.unlink(missing_ok=True)

    def _refuse(self, problem: str) -> None:
        raise InputRefused(
            f"`{self._path}` {problem}", hint="give `--overwrite` to begin again, or another `--output-file`"
        )

    def _failed(self, error: OSError) -> OutputFailed:
        hint = "make room or give another `--output-file`; the same command goes on behind the finished lines"
        if not self._path.parent.is_dir():
            hint = f"make the folder `{self._path.parent}` first"
        return OutputFailed(f"`{self._path}` cannot be written: {error.strerror or error}", hint=hint)


def _plain(value: Any) -> Any:
    """Sets in the same order every time."""
    return sorted(value) if isinstance(value, frozenset) else str(value)


def _digest(prompts: Sequence[Prompt]) -> str:
    said = [[prompt.content, dict(prompt.fields)] for prompt in prompts]
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode("utf-8", "surrogatepass")).hexdigest()


def _as_dict(one: Completion) -> dict[str, Any]:
    kind = "prompt" if isinstance(one.prompt, str) else "messages"
    rest = {"text": one.text, "tokens": one.tokens, "prompt_tokens": one.prompt_tokens, "finish": one.finish}
    return {kind: one.prompt, **rest}


def _prompt_of(line: bytes) -> Any:
    try:
        said = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return said.get("prompt", said.get("messages")) if isinstance(said, dict) else None
