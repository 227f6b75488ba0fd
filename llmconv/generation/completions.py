"""The results of generate: completions, the settings that were in force, and what they cost."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from llmconv.errors import InputRefused, OutputFailed
from llmconv.files.paths import Written, output_path
from llmconv.files.safe_folder import Folder, parents_made, require_parents, require_plain
from llmconv.generation.cost import GenerationCost
from llmconv.generation.prompts import Prompt
from llmconv.output.streaming import write_fully

TOO_LONG = "too_long"
"""`finish` of a prompt that leaves no room for new tokens, or is longer than the context."""


@dataclass(frozen=True)
class Completion:
    """A continuation of a prompt.

    Attributes:
        prompt: as given, a text or a chat.
        text: the new text, without the prompt.
        tokens: the new tokens, without the end token.
        prompt_tokens: number of tokens of the prompt that were used.
        finish: why it ended: `eos`, `length` or `stop`; or `too_long`: the prompt was left out.
        sequence: which continuation of this prompt, from 0.
        cut_tokens: number of tokens that `src_length` cut from the prompt.
        seconds: from the start of its batch to the last token.
    """

    prompt: Any
    text: str
    tokens: list[int]
    prompt_tokens: int
    finish: str
    sequence: int = 0
    cut_tokens: int = 0
    seconds: float = field(default=0.0, compare=False)

    def __repr__(self) -> str:
        return f"<Completion {shortened(self.text)!r}: {len(self.tokens)} tokens, {self.finish}>"


@dataclass(frozen=True)
class Generation:
    """All completions, in the order of the prompts, and their cost.

    Attributes:
        completions: `num_return_sequences` per prompt; empty if they are in `output_file`.
        backend: `onnx`, `torch` or `genai`.
        batches: cost of each batch, in the order in which they ran.
        encode_seconds: time in which all prompts became tokens.
        settings: what was in force, by the names of the options.
        too_long: number of prompts that were left out.
        output_file: the file with the completions, if there is one.
        kept: number of completions that the file had before.
    """

    completions: list[Completion]
    backend: str
    batches: list[GenerationCost]
    encode_seconds: float = 0.0
    settings: Mapping[str, Any] = field(default_factory=dict)
    too_long: int = 0
    output_file: Path | None = None
    kept: int = 0

    def __repr__(self) -> str:
        tokens = sum(len(one.tokens) for one in self.completions)
        first = f", first {shortened(self.completions[0].text)!r}" if self.completions else ""
        return f"<Generation: {len(self.completions)} completion(s), {tokens} tokens, {self.backend}{first}>"

    @property
    def total(self) -> GenerationCost:
        """The total of all batches."""
        return GenerationCost.sum(self.batches)

    def as_dict(self) -> dict[str, Any]:
        """For JSON, times rounded."""
        made: dict[str, Any] = {
            "completions": [{**asdict(one), "seconds": round(one.seconds, 4)} for one in self.completions]
        }
        if self.output_file:
            made = {"output_file": str(self.output_file), "kept": self.kept}
        costs, total = [cost.as_dict() for cost in self.batches], self.total.as_dict()
        if costs:
            total["time_to_first_token"] = costs[0]["time_to_first_token"]
        spent = {"too_long": self.too_long, "encode_seconds": round(self.encode_seconds, 4)}
        return {
            "backend": self.backend,
            "settings": dict(self.settings),
            **made,
            "batches": costs,
            **total,
            **spent,
        }

    def summary(self) -> list[str]:
        """Lines for a person: what the file had before, tokens and memory, and where the time went."""
        lines = [f"{self.kept} of the texts were finished before"] if self.kept else []
        if not self.batches:
            return lines
        return [*lines, self.total.summary(len(self.batches)), self.total.times(self.encode_seconds)]


def shortened(text: str, length: int = 60) -> str:
    """The first `length` characters of a text, with an ellipsis if there are more."""
    return text if len(text) <= length else text[: length - 1] + "…"


SIDE_FILE = ".{}.options.json"
"""Hidden file next to it: the prompts' digest and the options that its lines were made with."""


class CompletionFile:
    """JSON lines, appended batch by batch.

    Every line has the fields of the prompt, such as an `id`, and `prompt` or `messages`, `text`, `tokens`,
    `prompt_tokens` and `finish`. A hidden file next to it records the options, so that a run with other prompts or
    options is refused. No file is created or changed before the first batch is finished.

    Args:
        prompts: all prompts, in order.
        options: everything that the text depends on.
        overwrite: start again; the first batch replaces the file.
        added: further fields of `Completion` that every line has.

    Raises:
        InputRefused: the file is for other prompts or options, is not a file of completions, or is below a file.
        OutputFailed: it cannot be written.
    """

    def __init__(
        self,
        path: Written,
        prompts: Sequence[Prompt],
        options: Mapping[str, Any],
        *,
        overwrite: bool = False,
        added: Sequence[str] = (),
    ) -> None:
        path = output_path(path, "--output-file")
        self._path, self._side = path, path.with_name(SIDE_FILE.format(path.name))
        made_with = {"prompts": _digest(prompts), "count": len(prompts), "options": dict(options)}
        self._made_with = json.dumps(made_with, sort_keys=True, default=_plain)
        self._added = added
        self._fields = [prompt.fields for prompt in prompts]
        if path.exists() and not path.is_file():
            raise InputRefused(
                f"`{path}` is not a file", hint="give another `--output-file`; without it, text goes to stdout"
            )
        self._file: BinaryIO | None = None
        self._replaces = overwrite or not path.exists()
        if not overwrite:
            require_plain(path)
        self.done, self._size = (0, 0) if self._replaces else self._finished(prompts)
        self._require_writable()

    def write(self, completions: Sequence[Completion]) -> None:
        """Appends a batch, which is on the disk when this returns; raises OutputFailed."""
        given = self._fields[self.done : self.done + len(completions)]
        made = [{**fields, **_as_dict(one, self._added)} for fields, one in zip(given, completions, strict=True)]
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in made)
        lines = text.encode("utf-8", errors="surrogatepass")
        try:
            if self._file is None:
                self._file = self._replaced(lines) if self._replaces else self._continued()
            if not self._replaces:
                write_fully(self._file.fileno(), memoryview(lines))
                os.fsync(self._file.fileno())
            self._replaces = False
        except OSError as error:
            raise self._failed(error) from error
        self.done += len(completions)

    def __enter__(self) -> CompletionFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file:
            self._file.close()

    def _finished(self, prompts: Sequence[Prompt]) -> tuple[int, int]:
        """Number of complete lines, and their size in bytes."""
        if not self._path.exists():
            return 0, 0
        content = self._path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        lines = whole.splitlines()
        if not content:
            return 0, 0
        if not self._side.is_file():
            self._refuse("already exists, without a record of its prompts and options")
        if self._side.read_bytes() != self._made_with.encode():
            self._refuse("was begun with other prompts or options, or another model")
        for line, prompt in zip(lines, prompts, strict=False):
            if _prompt_of(line) != prompt.content:
                self._refuse("has other prompts")
        if len(lines) > len(prompts):
            self._refuse("has more lines than there are prompts")
        return len(lines), len(whole)

    def _require_writable(self) -> None:
        """Tries to open or create the files that a batch will need, without changing any."""
        require_parents(self._path)
        if not self._path.parent.is_dir():  # it is made with the file
            return
        try:
            with Folder.open(self._path.parent) as folder, folder.begin(self._side.name):
                if self._replaces:
                    with folder.begin(self._path.name):
                        return
                folder.open_to_append(self._path.name).close()
        except OSError as error:
            raise self._failed(error) from error

    def _replaced(self, lines: bytes) -> BinaryIO:
        """Replaces the file by one with the first lines, and opens it to append."""
        with (
            parents_made(self._path),
            Folder.open(self._path.parent) as folder,
            folder.begin(self._path.name) as file,
            folder.begin(self._side.name) as side,
        ):
            for new, content in ((file, lines), (side, self._made_with.encode())):
                new.write(content)
                new.sync()
            folder.remove(self._side.name)  # a run killed here must not leave options of another file
            file.place()
            side.place()
            folder.sync()
            return folder.open_to_append(self._path.name)

    def _continued(self) -> BinaryIO:
        """Cuts off the incomplete last line of a killed run, and opens the file to append."""
        with Folder.open(self._path.parent) as folder:
            folder.write(self._side.name, self._made_with.encode())
            file = folder.open_to_append(self._path.name)
        file.truncate(self._size)
        return file

    def _refuse(self, problem: str) -> None:
        raise InputRefused(
            f"`{self._path}` {problem}", hint="give `--overwrite` to start again, or another `--output-file`"
        )

    def _failed(self, error: OSError) -> OutputFailed:
        hint = "free disk space or give another `--output-file`; without `--overwrite` a run continues the file"
        return OutputFailed(f"`{self._path}` cannot be written: {error.strerror or error}", hint=hint)


def _plain(value: Any) -> Any:
    """Sets as sorted lists."""
    return sorted(value) if isinstance(value, frozenset) else str(value)


def _digest(prompts: Sequence[Prompt]) -> str:
    contents = [[one.content, dict(one.fields), *([repr(one.inputs)] if one.inputs else [])] for one in prompts]
    return hashlib.sha256(json.dumps(contents, sort_keys=True).encode("utf-8", "surrogatepass")).hexdigest()


def _as_dict(one: Completion, added: Sequence[str]) -> dict[str, Any]:
    kind = "prompt" if isinstance(one.prompt, str) else "messages"
    rest = {"text": one.text, "tokens": one.tokens, "prompt_tokens": one.prompt_tokens, "finish": one.finish}
    return {kind: one.prompt, **rest, **{name: getattr(one, name) for name in added}}


def _prompt_of(line: bytes) -> Any:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return content.get("prompt", content.get("messages")) if isinstance(content, dict) else None
