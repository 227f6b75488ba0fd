"""PromptRun: all prompts of a call, encoded, and run in batches; completions are collected or appended to a file."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from llmconv.errors import UsageProblem
from llmconv.generation.completions import TOO_LONG, Completion, CompletionFile, Generation, GenerationCost, Meter
from llmconv.generation.loop import SharedPrefix
from llmconv.generation.model import TextModel
from llmconv.generation.prompts import Prompt, shared_start
from llmconv.generation.row import TextPiece
from llmconv.generation.sampling import GenerationSettings, settings_fields, settings_line
from llmconv.generation.wording import PlannedText, Wording, encode_all
from llmconv.progress import say, warn

OnPiece = Callable[[TextPiece], object]


class TimedDecoder:
    """Decodes tokens to text, and adds up the seconds that it took."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode, self.seconds = decode, 0.0
        self.special_texts: Mapping[int, str] = getattr(decode, "special_texts", {})

    def __call__(self, tokens: Sequence[int]) -> str:
        """The text of token ids."""
        started = time.perf_counter()
        text = self._decode(tokens)
        self.seconds += time.perf_counter() - started
        return text


@dataclass
class _GrowingText:
    tokens: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    finish: str = ""

    def add(self, piece: TextPiece) -> None:
        self.text.append(piece.text)
        self.finish = piece.finish
        if piece.token is not None and piece.finish != "eos":
            self.tokens.append(piece.token)


@dataclass(frozen=True)
class Batches:
    """Runs texts in batches of at most `size`, fewer if the graphs are smaller.

    `shares`: the prompts have a common start that is run only once. `together` texts, the beams of a prompt, are not
    divided. With a `streamer` of transformers, texts run one by one.
    """

    model: TextModel
    settings: GenerationSettings
    size: int
    shares: bool = False
    together: int = 1
    streamer: object = None

    def run(
        self, prompts: Sequence[PlannedText], skip: int = 0, on_piece: OnPiece | None = None
    ) -> Iterator[tuple[list[Completion], GenerationCost]]:
        """Yields the completions and the cost of each batch; `on_piece` is called with every piece of text.

        The first `skip` prompts are finished already; those with a problem are completed without being run.
        """
        ids = [prompt.tokens for prompt in prompts if not prompt.problem]
        shares = self.shares and len(ids) > 1 and not any(prompt.embeddings or prompt.inputs for prompt in prompts)
        shared = SharedPrefix(shared_start(ids), self.model.positions) if shares else None
        size = min(self.size, self.model.sequences or self.size)
        size = max(size // self.together, 1) * self.together
        size = 1 if self.streamer else size
        for start in range(skip, len(prompts), size):
            yield self._run_one(prompts[start : start + size], shared, _numbered(on_piece, start))

    def _run_one(
        self, prompts: Sequence[PlannedText], shared: SharedPrefix | None, on_piece: OnPiece | None
    ) -> tuple[list[Completion], GenerationCost]:
        places = [at for at, prompt in enumerate(prompts) if not prompt.problem]
        fitting = [prompts[at] for at in places]
        growing = [_GrowingText(finish=TOO_LONG) for _ in prompts]
        for at in (at for at, prompt in enumerate(prompts) if prompt.problem and on_piece):
            assert on_piece
            on_piece(TextPiece(at, "", None, TOO_LONG))
        meter = Meter([len(one.tokens) for one in fitting], at_once=self.settings.num_beams > 1)
        decode = TimedDecoder(self.model.decode)
        for piece in self._pieces(fitting, shared, decode):
            growing[places[piece.index]].add(piece)
            if piece.token is not None:
                meter.count(piece.index)
            if on_piece:
                on_piece(TextPiece(places[piece.index], piece.text, piece.token, piece.finish))
        cost = meter.stop(decode.seconds)
        seconds = dict(zip(places, cost.latencies, strict=True))
        made = [_completion(*one, seconds.get(at, 0.0)) for at, one in enumerate(zip(prompts, growing, strict=True))]
        return made, cost

    def _pieces(
        self, prompts: Sequence[PlannedText], shared: SharedPrefix | None, decode: TimedDecoder
    ) -> Iterator[TextPiece]:
        if not prompts:
            return iter(())
        ids, samples = [one.tokens for one in prompts], [one.sample for one in prompts]
        rows = [one.embeddings() if one.embeddings else None for one in prompts]
        given: dict[str, Any] = {"samples": samples, "decode": decode, "streamer": self.streamer}
        if any(one.inputs for one in prompts):
            given["inputs"] = [one.inputs for one in prompts]
        return self.model.stream(ids, self.settings, shared, embeddings=rows, **given)


def _completion(prompt: PlannedText, made: _GrowingText, seconds: float) -> Completion:
    text, read = "".join(made.text), len(prompt.tokens)
    return Completion(prompt.content, text, made.tokens, read, made.finish, prompt.sequence, prompt.cut_tokens, seconds)


def _numbered(on_piece: OnPiece | None, start: int) -> OnPiece | None:
    """`on_piece`, with the index of the text among all texts, not in its batch."""
    if on_piece is None or start == 0:
        return on_piece
    return lambda piece: on_piece(TextPiece(start + piece.index, piece.text, piece.token, piece.finish))


BATCH_SIZE = 8
NEW_TOKENS = 64
"""Maximum number of new tokens, unless an option or `generation_config.json` gives another."""

MODEL_FILES = ("*.onnx", "*.safetensors", "tokenizer.json")
"""Files whose size and time show whether a model is still the one that an output file was begun with."""


@dataclass
class PromptRun:
    """The prompts of one call, and their completions and costs so far.

    Attributes:
        count: continuations per prompt.
        tuned: `adapter`, `prefix_tuning`, `decode` and `tokenizer`; a file is only continued with the same.
        encoded: the texts to generate: `count` per prompt.
        encode_seconds: the time that encoding them took.
        skipped: number of texts that the file had before.
        output: the file; None where completions are collected.
        talks: print the settings, and the cost of each batch.

    Raises:
        InputRefused: a prompt has no tokens, or all of them are too long.
        UsageProblem: several greedy continuations of a prompt, which would be equal, or more than there are beams.
    """

    model: TextModel
    prompts: Sequence[Prompt]
    settings: GenerationSettings
    wording: Wording = field(default_factory=Wording)
    batch_size: int = BATCH_SIZE
    count: int = 1
    tuned: Mapping[str, str] = field(default_factory=dict)
    encoded: list[PlannedText] = field(init=False)
    encode_seconds: float = field(init=False)
    completions: list[Completion] = field(default_factory=list)
    costs: list[GenerationCost] = field(default_factory=list)
    skipped: int = 0
    output: Path | None = None
    talks: bool = False

    def __post_init__(self) -> None:
        require_count(self.count, self.settings)
        started = time.perf_counter()
        self.encoded = encode_all(self.model, self.prompts, self.wording, self.settings, self.count)
        self.encode_seconds = time.perf_counter() - started

    @property
    def too_long(self) -> list[PlannedText]:
        """The prompts that are left out."""
        return [one for one in self.encoded if one.problem and one.sequence == 0]

    def run(
        self, output: Path | None = None, overwrite: bool = False, on_piece: OnPiece | None = None, streamer: Any = None
    ) -> Generation:
        """Runs all prompts, or those that the file of completions `output` does not have yet; None returns them.

        `overwrite` begins the file again; `on_piece` is called with every piece of text; with a `streamer` of
        transformers, texts run one by one. Raises as `CompletionFile`, and UsageProblem for `overwrite` without a file.
        """
        if output is None and overwrite:
            raise UsageProblem("`--overwrite` needs `--output-file`", hint="leave it out")
        if self.talks:
            self._announce()
        if self.too_long:
            first = str(self.too_long[0].problem)
            warn(f"{len(self.too_long)} of {len(self.prompts)} prompts are too long and left out: {first}")
        if output is None:
            self._run(self.completions.extend, on_piece, streamer)
        else:
            self._to_file(output, overwrite, on_piece, streamer)
        return self._result()

    def _announce(self) -> None:
        """Prints the settings, and how many prompts are cut."""
        batches = f", batches of {self.batch_size}" if len(self.encoded) > 1 else ""
        say(f"{settings_line(self.settings)}; {self.model.backend}{batches}")
        cut = [one for one in self.encoded if one.cut_tokens and one.sequence == 0]
        if cut:
            say(f"{len(cut)} of {len(self.prompts)} prompts cut to their last {self.wording.src_length} tokens")

    def _to_file(self, path: Path, overwrite: bool, on_piece: OnPiece | None, streamer: Any) -> None:
        """Runs the prompts that the file does not have yet."""
        folder = self.model.folder.resolve()
        files = sorted(path for kind in MODEL_FILES for path in folder.glob(kind))
        state = {path.name: (path.stat().st_size, path.stat().st_mtime_ns) for path in files}
        model = {"model": str(folder), "files": state, "backend": self.model.backend, **self.tuned}
        made_with = {**asdict(self.settings), **asdict(self.wording), "num_return_sequences": self.count, **model}
        added = ["sequence"] * (self.count > 1) + ["cut_tokens"] * (self.wording.src_length is not None)
        texts = [prompt for prompt in self.prompts for _ in range(self.count)]
        self.output = path
        with CompletionFile(path, texts, made_with, overwrite=overwrite, added=added) as file:
            self.skipped = file.done
            self._run(file.write, on_piece, streamer)

    def _run(self, take: Callable[[list[Completion]], object], on_piece: OnPiece | None, streamer: Any) -> None:
        together = self.count if self.settings.num_beams > 1 else 1
        shares = bool(self.wording.prompt_prefix)
        batches = Batches(self.model, self.settings, self.batch_size, shares, together, streamer)
        for completions, cost in batches.run(self.encoded, self.skipped, on_piece):
            take(completions)
            if not cost.prompts:
                continue
            self.costs.append(cost)
            if self.talks and len(self.encoded) > self.batch_size:
                say(f"batch {len(self.costs)}: {cost.summary()}")

    def _result(self) -> Generation:
        """The completions, costs and settings so far."""
        counts = {"num_return_sequences": self.count, "batch_size": self.batch_size}
        return Generation(
            self.completions,
            self.model.backend,
            self.costs,
            self.encode_seconds,
            {**settings_fields(self.settings), **asdict(self.wording), **counts},
            len(self.too_long),
            self.output,
            self.skipped,
        )


def require_count(count: int, settings: GenerationSettings) -> None:
    """Raises UsageProblem if several continuations of a prompt are greedy, or more than there are beams."""
    if count < 1:
        raise UsageProblem(f"`num_return_sequences` is {count}", hint="give at least 1")
    if 1 < settings.num_beams < count:
        raise UsageProblem(
            f"a search with {settings.num_beams} beams has no {count} sequences",
            hint=f"give `--num-beams {count}` (`num_beams={count}`)",
        )
    if count > 1 and settings.num_beams == 1 and settings.is_greedy:
        raise UsageProblem(
            f"{count} greedy sequences of a prompt would be the same",
            hint="sample, for example with `--temperature 1` (`do_sample=True`), or give `--num-beams`",
        )
