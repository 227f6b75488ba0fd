"""GenerationSettings: how text is continued, in the words and with the defaults of transformers' `GenerationConfig`."""

from __future__ import annotations

import difflib
import importlib
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from llmconv.checkpoint import read_json
from llmconv.errors import MalformedInput, UsageProblem
from llmconv.files.paths import kind_of, path_of

GENERATION_CONFIG = "generation_config.json"
DEFAULT_NEW_TOKENS = 20
"""Of transformers, where neither `max_new_tokens` nor `max_length` is said."""

NEUTRAL: dict[str, Any] = {
    "min_length": 0,
    "min_new_tokens": 0,
    "early_stopping": False,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "length_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "num_beam_groups": 1,
    "diversity_penalty": 0.0,
    "guidance_scale": 1.0,
    "remove_invalid_values": False,
    "renormalize_logits": False,
    "token_healing": False,
    "penalty_alpha": 0.0,
}
"""Fields that change the text, with the value that changes nothing; None changes nothing in any of them."""

BEAMS_ONLY = frozenset({"early_stopping", "length_penalty"})
"""Of them, those that change nothing without beams."""

NO_NEUTRAL = frozenset(
    {
        "max_time",
        "top_h",
        "bad_words_ids",
        "force_words_ids",
        "constraints",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "exponential_decay_length_penalty",
        "suppress_tokens",
        "begin_suppress_tokens",
        "sequence_bias",
        "watermarking_config",
        "dola_layers",
    }
)
"""Fields that change the text whenever they are there."""


@dataclass(frozen=True)
class GenerationSettings:
    """How the next tokens are picked, and when they end; every name is one of `transformers.GenerationConfig`.

    Attributes:
        max_new_tokens: at most so many, the prompt not counted; goes before `max_length`.
        max_length: at most so many, the prompt counted.
        do_sample: draw from the distribution; else the likeliest token, the lowest id among equals.
        temperature: logits are divided by it; 0 picks the likeliest whatever `do_sample` says.
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: keep the fewest likeliest tokens whose probabilities add up to at least p.
        min_p: keep tokens at least p times as likely as the likeliest.
        repetition_penalty: divides positive and multiplies negative logits of tokens that are there already.
        num_beams: sequences searched side by side.
        stop_strings: texts that end a sequence.
        eos_token_id: tokens that end a sequence.
        pad_token_id: of no influence on the text; None for 0.
        bos_token_id: what an empty prompt becomes.
        seed: of the sampling; every prompt has a generator of its own that starts from it.
        extra: fields of `GenerationConfig` that change the text and are none of these; transformers computes them.
        said: fields that are not defaults.

    Raises:
        UsageProblem: a value that cannot be.
    """

    max_new_tokens: int | None = None
    max_length: int | None = None
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 50
    top_p: float = 1.0
    min_p: float | None = None
    repetition_penalty: float = 1.0
    num_beams: int = 1
    stop_strings: tuple[str, ...] = ()
    eos_token_id: frozenset[int] = frozenset()
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    seed: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict)
    said: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        for name, value in _values({name: getattr(self, name) for name in KINDS}).items():
            object.__setattr__(self, name, value)
        for name, least, most in RANGES:
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise UsageProblem(
                    f"{name} {value} cannot be generated with", hint=f"give at least {least:g} and at most {most:g}"
                )

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is picked."""
        return not self.do_sample or self.temperature == 0

    @property
    def needs_processors(self) -> bool:
        """Whether fields are set that transformers' logits processors compute."""
        return bool(self.extra.keys() - BEAMS_ONLY)

    def new_tokens(self, prompt_tokens: int) -> int:
        """How many tokens may follow a prompt; 0 where `max_length` leaves no room."""
        if self.max_new_tokens is not None:
            return self.max_new_tokens
        if self.max_length is not None:
            return max(self.max_length - prompt_tokens, 0)
        return DEFAULT_NEW_TOKENS

    @classmethod
    def of(cls, folder: str | Path, **overrides: Any) -> GenerationSettings:
        """What a folder's `generation_config.json` says, under the options that are given.

        Args:
            folder: of a model; end tokens may stand in `config.json` instead.
            overrides: fields of `GenerationConfig`; None is not given.

        Raises:
            MalformedInput: a field of the file is no value of its kind.
            UsageProblem: an option cannot be.
        """
        folder = path_of(folder, "folder")
        said = {**_special_tokens(folder), **_read(folder / GENERATION_CONFIG)}
        try:
            settings = cls()._changed(said)
        except UsageProblem as error:
            raise MalformedInput(f"`{GENERATION_CONFIG}`: {error.message}", hint="mend or remove the file") from error
        return settings.but(**overrides)

    def but(self, **changes: Any) -> GenerationSettings:
        """These settings with other fields; None is not given, and a temperature of 0 is greedy.

        Raises:
            UsageProblem: no field of `GenerationConfig`, one that has no effect here, or a value that cannot be.
        """
        require_known(name for name, value in changes.items() if value is not None)
        require_effect(changes)
        return self._changed(changes)

    def _changed(self, changes: Mapping[str, Any]) -> GenerationSettings:
        """These settings with other fields; those of a file that mean nothing here are passed over."""
        given = {name: value for name, value in changes.items() if value is not None}
        if given.get("max_new_tokens") is None and given.get("max_length") is not None:
            given["max_new_tokens"] = None  # the latest word counts
        values = _values({name: value for name, value in given.items() if name in KINDS})
        said = self.said | {name for name, value in given.items() if value is not None}
        return replace(self, **values, extra={**self.extra, **changes_text(given)}, said=said)


def require_known(names: Iterable[str]) -> None:
    """Refuses what is no field of transformers' `GenerationConfig`: a slip of the pen would change nothing, silently.

    Raises:
        UsageProblem: there is one, and which is meant.
    """
    known = {*KINDS, *NEUTRAL, *NO_NEUTRAL}
    names = set(names)
    for name in sorted(names & ELSEWHERE.keys()):
        raise UsageProblem(f"`{name}` is not a setting of generation", hint=ELSEWHERE[name])
    if unknown := sorted(names - known):  # the rest is known to transformers, which takes seconds to load
        known |= importlib.import_module("transformers").GenerationConfig().to_dict().keys()
    for name in unknown:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"is `{near[0]}` meant?" if near else "see transformers' `GenerationConfig`"
            raise UsageProblem(f"`{name}` is not a setting of generation", hint=hint)


def require_settings(settings: Any) -> GenerationSettings:
    """The settings themselves.

    Raises:
        UsageProblem: a dictionary, or transformers' own object.
    """
    if not isinstance(settings, GenerationSettings):
        raise UsageProblem(
            f"`settings` is {kind_of(settings)}, not a `GenerationSettings`",
            hint="give `model.defaults.but(max_new_tokens=20, …)`",
        )
    return settings


def require_effect(changes: Mapping[str, Any]) -> None:
    """Refuses fields of `GenerationConfig` that change what transformers returns, and nothing here.

    Raises:
        UsageProblem: one is set.
    """
    if (changes.get("num_return_sequences") or 1) != 1:
        raise UsageProblem(
            "`num_return_sequences` has no effect here: each prompt is continued once",
            hint='`llmconv.pipeline("text-generation", …)` returns several, or repeat the prompt with another `seed`',
        )
    for name in RETURNED:
        if changes.get(name):
            raise UsageProblem(f"`{name}` has no effect here: texts and tokens are returned", hint="leave it out")


RANGES = (
    ("max_new_tokens", 1, 2**40),
    ("max_length", 1, 2**40),
    ("temperature", 0, 1e30),
    ("top_k", 0, 2**40),
    ("top_p", 1e-30, 1),
    ("min_p", 0, 1),
    ("repetition_penalty", 1e-30, 1e30),
    ("num_beams", 1, 10_000),
    ("seed", 0, 2**64),
)
"""Field, least and largest value; NaN is in none of them."""


RETURNED = ("output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate")

ELSEWHERE = {
    "tokenizer": "the tokenizer is the model folder's; `model=ModelFiles(FOLDER, tokenizer=OTHER)` names another one",
    "device": 'give `session=SessionSettings(provider="cuda")`; `backend="torch"` runs on the CPU',
    "device_map": "one process runs a model whole; `llmconv export --stages` divides its graphs",
    "torch_dtype": "graphs compute in float32; `llmconv export --dtype` says how weights are stored",
    "dtype": "graphs compute in float32; `llmconv export --dtype` says how weights are stored",
    "streamer": "`TextModel.stream` gives pieces as they come; `generate` takes `on_piece`",
    "model_kwargs": "give its fields by name",
    "prompt": "is `prompts` meant?",
    "stop": "is `stop_strings` meant?",
    "max_tokens": "is `max_new_tokens` meant?",
}
"""Words of transformers' pipeline and of other libraries, and the way to what they are for."""


def _whole(value: Any) -> int:
    """A whole number, also as `20.0` or `"20"`, as some files have it."""
    if isinstance(value, str) or (isinstance(value, float) and value.is_integer()):
        return int(value)
    return operator.index(_number(value))


def _number(value: Any) -> Any:
    if isinstance(value, bool):
        raise TypeError("True and False are not numbers")
    return value


def _optional_int(value: Any) -> int | None:
    return None if value is None else _whole(value)


def _real(value: Any) -> float:
    return float(_number(value))


def _optional_real(value: Any) -> float | None:
    return None if value is None else _real(value)


def _flag(value: Any) -> bool:
    if value not in (True, False) or isinstance(value, float):
        raise TypeError(f"{value!r:.40} is neither True nor False")
    return bool(value)


def _tokens(value: Any) -> frozenset[int]:
    return frozenset(map(_whole, value if isinstance(value, list | tuple | set | frozenset) else (value,)))


def _texts(value: Any) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else tuple(value)
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("a stop string is a text")
    return texts


KINDS: dict[str, Any] = {
    "max_new_tokens": _optional_int,
    "max_length": _optional_int,
    "do_sample": _flag,
    "temperature": _real,
    "top_k": _whole,
    "top_p": _real,
    "min_p": _optional_real,
    "repetition_penalty": _real,
    "num_beams": _whole,
    "stop_strings": _texts,
    "eos_token_id": _tokens,
    "pad_token_id": _optional_int,
    "bos_token_id": _optional_int,
    "seed": _whole,
}
"""Field to what makes its value of what a file or an option says."""


def _values(given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields as values of their kinds.

    Raises:
        UsageProblem: one is of another kind.
    """
    values = {}
    for name, value in given.items():
        try:
            values[name] = KINDS[name](value)
        except (TypeError, ValueError, OverflowError) as error:
            problem = f"`{name}` is {kind_of(value)} ({value!r:.40}), which is not a value of its kind"
            raise UsageProblem(problem, hint=f"see `{name}` of transformers' `GenerationConfig`") from error
    return values


def changes_text(said: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that our own loop does not know and that change the text."""
    found = {name: said[name] for name, neutral in NEUTRAL.items() if said.get(name) not in (None, neutral)}
    return found | {name: said[name] for name in sorted(NO_NEUTRAL) if said.get(name) is not None}


def _special_tokens(folder: Path) -> dict[str, Any]:
    """Start, end and padding tokens of `config.json`, which count where `generation_config.json` names none."""
    config = _read(folder / "config.json")
    text = config.get("text_config")
    merged = {**config, **(text if isinstance(text, dict) else {})}
    return {name: merged.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}


def _read(path: Path) -> dict[str, Any]:
    return {name: value for name, value in read_json(path).items() if value is not None} if path.is_file() else {}
