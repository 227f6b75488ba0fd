"""The results of generate: completions, the settings that were in force, and what they cost."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from llmconv import memory
from llmconv.errors import InputRefused, OutputFailed
from llmconv.files.paths import Written, output_path
from llmconv.files.safe_folder import Folder, parents_made, require_parents, require_plain, write_fully
from llmconv.generation.prompts import Prompt

TOO_LONG = "too_long"  # `finish` of a prompt that leaves no room for new tokens, or is longer than the context


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
        return {"backend": self.backend, "settings": dict(self.settings), **made, "batches": costs, **total, **spent}

    def summary(self) -> list[str]:
        """Lines for a person: what the file had before, tokens and memory, and where the time went."""
        lines = [f"{self.kept} of the texts were finished before"] if self.kept else []
        if not self.batches:
            return lines
        return [*lines, self.total.summary(len(self.batches)), self.total.times(self.encode_seconds)]


def shortened(text: str, length: int = 60) -> str:
    """The first `length` characters of a text, with an ellipsis if there are more."""
    return text if len(text) <= length else text[: length - 1] + "…"


# hidden file next to it: the prompts' digest and the options that its lines were made with
SIDE_FILE = ".{}.options.json"


class CompletionFile:
    """JSON lines, appended batch by batch; no file is created or changed before the first batch is finished.

    Every line has the fields of the prompt, such as an `id`, and `prompt` or `messages`, `text`, `tokens`,
    `prompt_tokens`, `finish`, and the fields `added`. A hidden file next to it records the `options`, on which the text
    depends. Raises InputRefused if the file is for other prompts or options, is not a file of completions, or is below
    a file; OutputFailed if it cannot be written. `overwrite` starts again.
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
        self._made_with = json.dumps(
            {"prompts": _digest(prompts), "count": len(prompts), "options": dict(options)},
            sort_keys=True,
            default=lambda value: sorted(value) if isinstance(value, frozenset) else str(value),
        )
        self._added = added
        self._fields = [prompt.fields for prompt in prompts]
        if path.exists() and not path.is_file():
            problem = f"`{path}` is not a file"
            raise InputRefused(problem, hint="give another `--output-file`; without it, text goes to stdout")
        self._file: BinaryIO | None = None
        self._replaces = overwrite or not path.exists()
        if not overwrite:
            require_plain(path)
        self.done, self._size = (0, 0) if self._replaces else self._finished(prompts)
        self._require_writable()

    def write(self, completions: Sequence[Completion]) -> None:
        """Appends a batch, which is on the disk when this returns; raises OutputFailed."""
        given = self._fields[self.done : self.done + len(completions)]
        made = []
        for fields, one in zip(given, completions, strict=True):
            kind = "prompt" if isinstance(one.prompt, str) else "messages"
            names = ("text", "tokens", "prompt_tokens", "finish", *self._added)
            made.append({**fields, kind: one.prompt, **{name: getattr(one, name) for name in names}})
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

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._file:
            self._file.close()

    def _finished(self, prompts: Sequence[Prompt]) -> tuple[int, int]:
        """Number of complete lines, and their size in bytes."""
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
        message = f"`{self._path}` {problem}"
        raise InputRefused(message, hint="give `--overwrite` to start again, or another `--output-file`")

    def _failed(self, error: OSError) -> OutputFailed:
        hint = "free disk space or give another `--output-file`; without `--overwrite` a run continues the file"
        return OutputFailed(f"`{self._path}` cannot be written: {error.strerror or error}", hint=hint)


def _digest(prompts: Sequence[Prompt]) -> str:
    """A hash of the prompts with all that they have besides tokens; InputRefused for a file that cannot be read."""
    found = hashlib.sha256()
    for one in prompts:
        given = {"content": one.content, "fields": dict(one.fields), "placeholder": one.placeholder}
        found.update(json.dumps(given, sort_keys=True, default=str).encode("utf-8", "surrogatepass"))
        for kind, several in (("images", one.images), ("embeddings", [one.embeddings]), *one.inputs.items()):
            values = several if kind in ("images", "embeddings") else [several]
            for value in values:
                found.update(f"\n{kind} ".encode())
                found.update(_bytes_of(value))
    return found.hexdigest()


def _bytes_of(value: Any) -> bytes:
    """The content of a file, an array, a tensor or an image; that of None is empty."""
    if isinstance(value, str | Path):
        try:
            with open(value, "rb") as file:
                return hashlib.file_digest(file, "sha256").digest()
        except OSError as error:
            hint = "give the path of a file"
            raise InputRefused(f"`{value}` cannot be read: {error.strerror}", hint=hint) from error
    if value is None or isinstance(value, bytes):
        return value or b""
    if hasattr(value, "mode") and hasattr(value, "tobytes"):  # an image of Pillow
        return f"{value.mode} {value.size} ".encode() + bytes(value.tobytes())
    value = value.detach().float().cpu() if hasattr(value, "detach") else value  # a tensor: numpy has no bfloat16
    array = np.asarray(value)
    return f"{array.dtype} {array.shape} ".encode() + array.tobytes()


def _prompt_of(line: bytes) -> Any:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return content.get("prompt", content.get("messages")) if isinstance(content, dict) else None


# has `VmHWM`, see `proc_pid_status(5)`; `getrusage` also counts memory of the parent process
STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class GenerationCost:
    """Time and memory of one batch, or of several batches in sequence.

    Attributes:
        prompts: number of prompts; one that is continued several times counts as several.
        prompt_tokens: total over all prompts.
        new_tokens: total over all prompts, end tokens included.
        first_seconds: from the start to the first token of the batch; summed over batches.
        seconds: from the start to the last token.
        peak_bytes: largest resident memory of the process so far, including mapped weights that were read.
        decode_seconds: the part of `seconds` in which tokens became text.
        latencies: seconds from the start of its batch to the last token, for each prompt.
        guessed_tokens: those of `new_tokens` that came from the call of the token before them.
    """

    prompts: int
    prompt_tokens: int
    new_tokens: int
    first_seconds: float
    seconds: float
    peak_bytes: int
    decode_seconds: float = 0.0
    latencies: tuple[float, ...] = ()
    guessed_tokens: int = 0

    @property
    def prompt_rate(self) -> float:
        """Prompt tokens per second until the first token."""
        return self.prompt_tokens / self.first_seconds if self.first_seconds else 0.0

    @property
    def rate(self) -> float:
        """New tokens per second after the first token of each prompt; over all tokens if they all came at once."""
        if self.first_seconds == self.seconds:
            return self.new_tokens / self.seconds if self.seconds else 0.0
        later, seconds = self.new_tokens - self.prompts, self.seconds - self.first_seconds
        return later / seconds if later > 0 and seconds > 0 else 0.0

    @property
    def ms_per_token(self) -> float:
        """Milliseconds per new token: the inverse of `rate`, of the same tokens and the same time."""
        return 1000 / self.rate if self.rate else 0.0

    @property
    def tokens_per_call(self) -> float:
        """New tokens of a sequence per call of the model."""
        calls = self.new_tokens - self.guessed_tokens
        return self.new_tokens / calls if calls else 0.0

    def latency(self, percent: float) -> float:
        """The latency in seconds that `percent` of the prompts do not exceed, interpolated linearly."""
        return float(np.percentile(self.latencies, percent)) if self.latencies else 0.0

    def as_dict(self) -> dict[str, float]:
        """For JSON, rounded."""
        return {
            "prompts": self.prompts,
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": self.new_tokens,
            "time_to_first_token": round(self.first_seconds, 4),
            "seconds": round(self.seconds, 4),
            "decode_seconds": round(self.decode_seconds, 4),
            "latency_p50": round(self.latency(50), 4),
            "latency_p90": round(self.latency(90), 4),
            "ms_per_token": round(self.ms_per_token, 3),
            "prompt_tokens_per_second": round(self.prompt_rate, 2),
            "tokens_per_second": round(self.rate, 2),
            "tokens_per_call": round(self.tokens_per_call, 3),
            "peak_bytes": self.peak_bytes,
        }

    def summary(self, batches: int = 1) -> str:
        """One line for a person; `batches` is the number of batches in the sum."""
        counts = f"{self.prompt_tokens} token{'s' * (self.prompt_tokens != 1)} in, {self.new_tokens} out"
        first = f"{'first token after' if batches == 1 else 'prompts took'} {self.first_seconds:.3f} s"
        several = f", {self.tokens_per_call:.1f} per call" if self.tokens_per_call >= 1.05 else ""
        return f"{counts}; {first}, then {self.rate:.1f} tokens/s{several}; peak memory {self.peak_bytes / 1e9:.2f} GB"

    def times(self, encode_seconds: float) -> str:
        """One line for a person on where the time went, `encode_seconds` of it until all prompts became tokens."""
        spent = f"encode {encode_seconds:.3f} s, generate {self.seconds - self.decode_seconds:.3f} s"
        percentiles = f"p50 {self.latency(50):.3f} s, p90 {self.latency(90):.3f} s"
        return f"{spent}, decode {self.decode_seconds:.3f} s; latency {percentiles}"

    @classmethod
    def sum(cls, costs: Sequence[GenerationCost]) -> GenerationCost:
        """The total of batches that ran in sequence."""
        names = cls.__dataclass_fields__.keys() - {"peak_bytes", "latencies"}
        totals: dict[str, Any] = {name: sum(getattr(cost, name) for cost in costs) for name in names}
        latencies = tuple(latency for cost in costs for latency in cost.latencies)
        return cls(**totals, latencies=latencies, peak_bytes=max((cost.peak_bytes for cost in costs), default=0))


class Meter:
    """Measures one batch of `prompts` (token counts); `at_once`: all tokens of a text come together, as of beams."""

    def __init__(self, prompts: Sequence[int], at_once: bool = False) -> None:
        self._prompts, self._at_once = prompts, at_once
        self._started, self._first, self._tokens = time.perf_counter(), 0.0, 0
        self._latest = [self._started] * len(prompts)
        self._guessed = 0

    def count(self, index: int, *, guessed: bool = False) -> None:
        self._tokens += 1
        self._guessed += guessed
        self._latest[index] = time.perf_counter()
        self._first = self._first or self._latest[index]

    def stop(self, decode_seconds: float = 0.0) -> GenerationCost:
        """The cost of the batch, which ends now; `decode_seconds` is the time in which tokens became text."""
        ended = time.perf_counter()
        self._first = 0.0 if self._at_once else self._first
        return GenerationCost(
            len(self._prompts),
            sum(self._prompts),
            self._tokens,
            (self._first or ended) - self._started,
            ended - self._started,
            peak_memory(),
            decode_seconds,
            tuple(latest - self._started for latest in self._latest),
            self._guessed,
        )


def peak_memory() -> int:
    """Largest resident set of the process so far, in bytes."""
    try:
        return 1024 * int(STATUS.read_text().split("VmHWM:")[1].split()[0])
    except (OSError, IndexError, ValueError):
        return memory.peak_memory()
