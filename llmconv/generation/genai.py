"""The genai backend: ONNX Runtime GenAI runs the graphs and picks the tokens; texts and ends are ours."""

from __future__ import annotations

import importlib
import json
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from llmconv.checkpoint import read_json
from llmconv.errors import InputRefused, MalformedInput, UsageProblem, first_line
from llmconv.generation.model import TextModel
from llmconv.generation.row import Row, TextPiece
from llmconv.generation.sampling.settings import BEAMS_ONLY, GenerationSettings
from llmconv.runtime.onnxruntime.genai_guard import CONFIG, read_genai_config
from llmconv.runtime.onnxruntime.session_settings import CPU, SessionSettings

OTHER = "give `--backend onnx`"
SEEDS = 2**31
"""GenAI's seeds are less."""


@dataclass(frozen=True)
class GenaiModel(TextModel):
    """A folder with `genai_config.json`; `runner` is GenAI's own model.

    Nothing of a conversation is kept: every turn runs its whole prompt.

    Attributes:
        ends: the end tokens of `genai_config.json`, at which GenAI stops whatever the settings say.
        padding: its padding token, which GenAI takes for padding wherever it stands in a batch.
        vocabulary: size of the logits.
        has_window: padding behind a prompt would count within a sliding window.
    """

    ends: frozenset[int] = field(default=frozenset())
    padding: int = 0
    vocabulary: int = 0
    has_window: bool = False

    @classmethod
    def load(cls, folder: Path, session: SessionSettings | None = None, **parts: Any) -> GenaiModel:
        """Opens a folder.

        Args:
            folder: has `genai_config.json`.
            session: threads, packing, provider and configuration entries.
            parts: the other attributes of `TextModel`.

        Raises:
            InputRefused: onnxruntime-genai is not installed, or the folder was not made for it.
            MalformedInput: GenAI cannot open it.
            UsageProblem: session settings that GenAI does not take.
        """
        if not (folder / CONFIG).is_file():
            raise InputRefused(f"`{folder}` has no {CONFIG}", hint=f"`llmconv export {folder} --layout genai`")
        said = read_genai_config(folder)
        model = _open(_library(), folder, session or SessionSettings())
        ends = said.get("eos_token_id", [])
        lengths = [parts.pop("context_length", None), _whole(said, "context_length")]
        return cls(
            runner=model,
            backend="genai",
            folder=folder,
            context_length=min((length for length in lengths if length), default=None),
            ends=frozenset(end for end in (ends if isinstance(ends, list) else [ends]) if isinstance(end, int)),
            padding=_whole(said, "pad_token_id"),
            vocabulary=_whole(said, "vocab_size"),
            has_window=_has_window(folder),
            **parts,
        )

    def _limit(self, name: str, prompt_tokens: int, settings: GenerationSettings) -> int:
        """As for graphs, but the last token needs room, too."""
        limit = super()._limit(name, prompt_tokens, settings)
        return limit if self.context_length is None else min(limit, self.context_length - prompt_tokens)

    def _grow(
        self, prompts: Sequence[Sequence[int]], limits: Sequence[int], settings: GenerationSettings, *_: Any, **__: Any
    ) -> Generator[TextPiece]:
        """Greedy search or sampling, by GenAI's own search, which keeps its cache itself and takes a prompt at once."""
        _require_known(settings)
        settings = settings.but(eos_token_id=settings.eos_token_id | self.ends)
        rows = [Row(at, *given, settings, self.decode) for at, given in enumerate(zip(prompts, limits, strict=True))]
        yield from (TextPiece(row.index, "", None, row.finish) for row in rows if row.finish)
        going = [row for row in rows if not row.finish]
        groups = [going] if self._fit_together(going, settings) else [[row] for row in going]
        searches = [self._search_for(group, settings) for group in groups]
        while searches:
            for search in searches:
                yield from self._step(*search)
            searches = [(generator, group) for generator, group in searches if not all(row.finish for row in group)]

    def _beams(
        self, prompt: Sequence[int], limit: int, settings: GenerationSettings, count: int
    ) -> Sequence[list[int]]:
        raise UsageProblem("beams are not searched with GenAI", hint=OTHER)

    def _fit_together(self, rows: Sequence[Row], settings: GenerationSettings) -> bool:
        """Whether each row gets in a batch what it gets alone: GenAI draws for all rows from one generator of numbers,
        and pads on the right with a token that it also finds inside of prompts, and penalises."""
        if len(rows) < 2 or not settings.is_greedy or any(self.padding in row.prompt for row in rows):
            return False
        is_even = len({len(row.prompt) for row in rows}) == 1
        return is_even or (settings.repetition_penalty == 1 and not settings.extra and not self.has_window)

    def _search_for(self, rows: Sequence[Row], settings: GenerationSettings) -> tuple[Any, Sequence[Row]]:
        """A generator of GenAI that has taken the prompts of the rows, not yet run."""
        genai = _library()
        longest = max(len(row.prompt) for row in rows)
        room = max(row.room for row in rows)
        length = longest + room if self.context_length is None else min(longest + room, self.context_length)
        options = {"max_length": length, "batch_size": len(rows), **search_options(settings, self.vocabulary)}
        params = genai.GeneratorParams(self.runner)
        params.set_search_options(**options)
        return genai.Generator(self.runner, params), rows

    def _step(self, generator: Any, rows: Sequence[Row]) -> Iterator[TextPiece]:
        """The next token of every row, the prompts before the first."""
        try:
            if generator.token_count() == 0:
                generator.append_tokens(self._padded([row.prompt for row in rows]))
            generator.generate_next_token()
        except Exception as error:  # GenAI's exceptions share no base class of their own
            raise MalformedInput(
                f"GenAI cannot run the graphs: {first_line(error)}", hint="run `llmconv verify` on the folder"
            ) from error
        is_last = generator.is_done()
        for row, token in zip(rows, generator.get_next_tokens().tolist(), strict=True):
            if not row.finish:
                yield row.push(token, is_last)

    def _padded(self, prompts: Sequence[Sequence[int]]) -> Any:
        longest = max(map(len, prompts))
        rows = [[*prompt, *[self.padding] * (longest - len(prompt))] for prompt in prompts]
        return np.array(rows if len(rows) > 1 else rows[0], dtype=np.int32)


def search_options(settings: GenerationSettings, vocabulary: int) -> dict[str, Any]:
    """GenAI's names for the settings; a top-k of 0 means all tokens here, and the likeliest one there."""
    options: dict[str, Any] = {
        "do_sample": not settings.is_greedy,
        "repetition_penalty": settings.repetition_penalty,
        **{name: settings.extra[name] for name in PASSED_ON & settings.extra.keys()},
    }
    if not settings.is_greedy:
        options |= {
            "temperature": settings.temperature,
            "top_k": settings.top_k or vocabulary,
            "top_p": settings.top_p,
            "random_seed": settings.seed % SEEDS,
        }
    return options


PASSED_ON = {"no_repeat_ngram_size"}
"""Fields of `generation_config.json` that GenAI knows by the same name."""


def _require_known(settings: GenerationSettings) -> None:
    unknown = sorted(settings.extra.keys() - BEAMS_ONLY - PASSED_ON)
    if settings.min_p and not settings.is_greedy:
        unknown.append("min_p")
    if unknown:
        raise UsageProblem(f"GenAI has no {', '.join(unknown)}", hint=OTHER)


def _library() -> Any:
    try:
        return importlib.import_module("onnxruntime_genai")
    except ImportError as error:
        raise InputRefused(
            f"`--backend genai` needs onnxruntime-genai: {first_line(error)}",
            hint="`pip install 'onnxruntime-genai>=0.18'`",
        ) from error


def _open(genai: Any, folder: Path, session: SessionSettings) -> Any:
    if session.attributes or session.free_dimensions:
        raise UsageProblem("GenAI takes no [session] and no [free_dimensions]", hint="use [entries] and [provider]")
    options: dict[str, Any] = dict(session.entries)
    if session.threads:
        options["intra_op_num_threads"] = session.threads
    if session.prepack:
        options["session.disable_prepacking"] = "0"
    try:
        config = genai.Config(str(folder))
        config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
        if session.provider != CPU:
            name = session.provider.removesuffix("ExecutionProvider").lower()
            config.clear_providers()
            config.append_provider(name)
            for key, value in session.provider_options.items():
                config.set_provider_option(name, key, value)
        return genai.Model(config)
    except Exception as error:  # GenAI's exceptions share no base class of their own
        raise MalformedInput(
            f"GenAI cannot open `{folder}`: {first_line(error)}", hint=f"`llmconv export {folder} --layout genai` again"
        ) from error


def _whole(said: dict[str, Any], name: str) -> int:
    """A number of `genai_config.json`, which GenAI itself has read by now; 0 where there is none."""
    value = said.get(name)
    return value if isinstance(value, int) else 0


def _has_window(folder: Path) -> bool:
    path = folder / "config.json"
    config = read_json(path) if path.is_file() else {}
    text = config.get("text_config")
    return bool({**config, **(text if isinstance(text, dict) else {})}.get("sliding_window"))
