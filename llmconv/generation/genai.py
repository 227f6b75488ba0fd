"""The genai backend: ONNX Runtime GenAI runs the graphs and picks the tokens; llmconv decodes and stops."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from llmconv.causal_lm import LengthSwitch, context_length, has_window, language_config, length_switch
from llmconv.errors import InputRefused, MalformedInput, UsageProblem, first_line, word
from llmconv.generation.row import Row, RowStart, TextPiece
from llmconv.generation.sampling import BEAMS_ONLY, GenerationSettings
from llmconv.not_a_model_folder import export_again, is_quantized_export
from llmconv.runtime.onnxruntime.session_file import CONFIG, read_genai_config, returns_last_logits
from llmconv.runtime.onnxruntime.session_settings import CPU, SessionSettings
from llmconv.runtime.runner import Runner

OTHER = "give `--backend onnx`"
LAYOUT = "--layout genai"
SEEDS = 2**31  # exclusive upper bound of GenAI's seeds


@dataclass(eq=False)
class GenaiEngine(Runner):
    """A folder with `genai_config.json`, opened by GenAI; keeps no cache: every turn runs its whole prompt.

    GenAI pads batches of any size itself. As a `Runner` it has the defaults alone: steps are not run one by one.
    """

    open_with: Callable[[int], Any]  # GenAI's model, which takes this token for padding wherever it stands
    context_length: int | None  # tokens of prompt and new text together; None if unknown
    ends: frozenset[int]  # end tokens of `genai_config.json`, at which GenAI stops whatever the settings are
    vocabulary: int  # size of the logits
    has_window: bool  # the model has a sliding window, in which padding after a prompt would count
    # the graphs return logits of the last column, which is padding after a shorter prompt
    has_last_logits: bool = False
    # as in `Runner`; a longer row of a batch would change the frequencies of a shorter one
    length_switch: LengthSwitch | None = None
    runs_last_token = True

    def __post_init__(self) -> None:
        """Opens the model with the last token as padding, since that of `genai_config.json` often ends turns."""
        self.padding = self.vocabulary - 1
        self.model = self.open_with(self.padding)

    @property
    def cache_capacity(self) -> int | None:
        return self.context_length

    @classmethod
    def load(cls, folder: Path, session: SessionSettings | None = None) -> GenaiEngine:
        """Opens a folder with `genai_config.json`, which may have a shorter `context_length` than the model.

        Raises InputRefused without onnxruntime-genai, or if the folder was not exported for it; MalformedInput if GenAI
        cannot open it; UsageProblem for session settings that GenAI does not have.
        """
        if not (folder / CONFIG).is_file():
            again = (
                export_again(folder, LAYOUT)
                if is_quantized_export(folder)
                else f"llmconv export {word(folder)} {LAYOUT}"
            )
            raise InputRefused(f"`{folder}` has no {CONFIG}", hint=f"`{again}`")
        config = read_genai_config(folder)
        genai = _library()
        ends = config.get("eos_token_id", [])
        lengths = [context_length(folder), _integer(config, "context_length")]
        return cls(
            lambda padding: _open(genai, folder, session or SessionSettings(), padding),
            context_length=min((length for length in lengths if length), default=None),
            ends=frozenset(end for end in (ends if isinstance(ends, list) else [ends]) if isinstance(end, int)),
            vocabulary=_integer(config, "vocab_size"),
            has_window=has_window(folder),
            has_last_logits=returns_last_logits(folder, config),
            length_switch=length_switch(language_config(folder)),
        )

    def grow(
        self, starts: Sequence[RowStart], settings: GenerationSettings, decode: Callable[[Sequence[int]], str], *_: Any
    ) -> Generator[TextPiece]:
        """See `LoopEngine.grow`; GenAI has its own cache and takes a prompt at once."""
        unknown = sorted(settings.extra.keys() - BEAMS_ONLY - PASSED_ON)
        if settings.min_p and not settings.is_greedy:
            unknown.append("min_p")
        if unknown:
            raise UsageProblem(f"GenAI does not support {', '.join(unknown)}", hint=OTHER)
        settings = settings.but(eos_token_id=settings.eos_token_id | self.ends)
        rows = [Row(at, start, settings, decode) for at, start in enumerate(starts)]
        yield from (TextPiece(row.index, "", None, row.finish) for row in rows if row.finish)
        going = [row for row in rows if not row.finish]
        self._avoid({token for row in going for token in row.prompt})
        groups = [going] if self._fit_together(going, settings) else [[row] for row in going]
        searches = [self._search_for(group, settings) for group in groups]
        while searches:
            for search in searches:
                yield from self._step(*search)
            searches = [(generator, group) for generator, group in searches if not all(row.finish for row in group)]

    def beams(self, *_: Any) -> NoReturn:
        """Raises UsageProblem: GenAI's beam search is not used."""
        raise UsageProblem("beam search is not supported with GenAI", hint=OTHER)

    def _avoid(self, tokens: set[int]) -> None:
        """Opens the model again if its padding is among the tokens: GenAI would not run them, not even in one row."""
        if self.padding in tokens:
            self.padding = next((token for token in range(self.vocabulary - 1, -1, -1) if token not in tokens), -1)
            if self.padding < 0:
                raise UsageProblem("GenAI needs a token that no prompt has, as padding", hint=OTHER)
            self.model = None  # before the next is opened: there is memory for one
            self.model = self.open_with(self.padding)

    def _fit_together(self, rows: Sequence[Row], settings: GenerationSettings) -> bool:
        """Whether each row gives the same text in a batch as alone.

        GenAI samples all rows from one random generator, and pads on the right with a token that it penalizes.
        """
        if len(rows) < 2 or not settings.is_greedy:
            return False
        is_even = len({len(row.prompt) for row in rows}) == 1
        longest = max(len(row.prompt) + row.room for row in rows)
        if not is_even and self.length_switch and longest > self.length_switch.tokens:
            return False
        reads_padding = self.has_window or self.has_last_logits
        return is_even or (settings.repetition_penalty == 1 and not settings.extra and not reads_padding)

    def _search_for(self, rows: Sequence[Row], settings: GenerationSettings) -> tuple[Any, Sequence[Row]]:
        """A new generator of GenAI, and the rows whose prompts it will run."""
        genai = _library()
        length = max(len(row.prompt) for row in rows) + max(row.room for row in rows)
        options: dict[str, Any] = {
            "max_length": length if self.context_length is None else min(length, self.context_length),
            "batch_size": len(rows),
            "do_sample": not settings.is_greedy,
            "repetition_penalty": settings.repetition_penalty,
            **NEUTRAL,  # whatever `genai_config.json` has
            **{name: settings.extra[name] for name in PASSED_ON & settings.extra.keys()},
        }
        if not settings.is_greedy:
            sample = rows[0].sample
            seed = int(settings.seed_of(sample).generate_state(1)[0]) if sample else settings.seed
            options |= {
                "temperature": settings.temperature,
                "top_k": settings.top_k or self.vocabulary,  # 0 means only the likeliest in GenAI
                "top_p": settings.top_p,
                "random_seed": seed % SEEDS,
            }
        params = genai.GeneratorParams(self.model)
        params.set_search_options(**options)
        return genai.Generator(self.model, params), rows

    def _step(self, generator: Any, rows: Sequence[Row]) -> Iterator[TextPiece]:
        """Runs the next token of every row; the first call also runs the prompts."""
        try:
            if generator.token_count() == 0:
                longest = max(len(row.prompt) for row in rows)
                padded = [[*row.prompt, *[self.padding] * (longest - len(row.prompt))] for row in rows]
                generator.append_tokens(np.array(padded if len(padded) > 1 else padded[0], dtype=np.int32))
            generator.generate_next_token()
        except Exception as error:  # GenAI's exceptions have no common base class
            problem = f"GenAI cannot run the graphs: {first_line(error)}"
            raise MalformedInput(problem, hint="run `llmconv verify` on the folder") from error
        is_last = generator.is_done()
        for row, token in zip(rows, generator.get_next_tokens().tolist(), strict=True):
            if not row.finish:
                yield row.push(token, is_last)


PASSED_ON = {"no_repeat_ngram_size"}  # fields of `generation_config.json` that have the same name in GenAI
NEUTRAL = {"no_repeat_ngram_size": 0, "min_length": 0, "num_beams": 1, "num_return_sequences": 1}


def _library() -> Any:
    try:
        return importlib.import_module("onnxruntime_genai")
    except ImportError as error:
        problem = f"`--backend genai` needs onnxruntime-genai: {first_line(error)}"
        raise InputRefused(problem, hint="`pip install 'onnxruntime-genai>=0.18'`") from error


def _open(genai: Any, folder: Path, session: SessionSettings, padding: int) -> Any:
    if session.attributes or session.free_dimensions:
        raise UsageProblem("GenAI does not support [session] or [free_dimensions]", hint="use [entries] and [provider]")
    if session.stages:
        raise UsageProblem("GenAI does not run graphs in stages", hint="leave out the sections `[stage N]`")
    if session.packed_cache:
        raise UsageProblem("GenAI packs the weights whenever it opens a model", hint="leave out `--packed-cache`")
    options: dict[str, Any] = dict(session.entries)
    if session.threads:
        options["intra_op_num_threads"] = session.threads
    if session.prepack:
        options["session.disable_prepacking"] = "0"
    try:
        config = genai.Config(str(folder))
        config.overlay(json.dumps({"model": {"pad_token_id": padding, "decoder": {"session_options": options}}}))
        if session.provider != CPU:
            name = session.provider.removesuffix("ExecutionProvider").lower()
            config.clear_providers()
            config.append_provider(name)
            for key, value in session.provider_options.items():
                config.set_provider_option(name, key, value)
        return genai.Model(config)
    except Exception as error:  # GenAI's exceptions have no common base class
        problem = f"GenAI cannot open `{folder}`: {first_line(error)}"
        raise MalformedInput(problem, hint=f"`llmconv export {word(folder)} --layout genai` again") from error


def _integer(config: dict[str, Any], name: str) -> int:
    """An integer of `genai_config.json`, which GenAI has validated by now; 0 if missing."""
    value = config.get(name)
    return value if isinstance(value, int) else 0
