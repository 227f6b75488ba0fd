"""GenerationSettings: how text is generated, with the names and defaults of transformers' `GenerationConfig`."""

from __future__ import annotations

import difflib
import operator
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from llmconv.causal_lm import GENERATION, SPECIAL_TOKENS, generation_fields
from llmconv.checkpoint import read_json
from llmconv.errors import MalformedInput, UsageProblem
from llmconv.files.paths import kind_of, path_of

if TYPE_CHECKING:
    from llmconv.generation.structured import Structure
    from llmconv.generation.token_rules import TokenRules

GENERATION_CONFIG, CONFIG = "generation_config.json", "config.json"
DEFAULT_NEW_TOKENS = 20  # transformers' default if neither `max_new_tokens` nor `max_length` is set

BEAMS_ONLY = frozenset({"early_stopping", "length_penalty"})  # fields of `EXTRA` that have no effect without beams


@dataclass(frozen=True)
class GenerationSettings:
    """How tokens are picked, and when a text ends; names as in `transformers.GenerationConfig`.

    Attributes:
        max_new_tokens: maximum number of new tokens; takes precedence over `max_length`.
        max_length: maximum number of tokens, prompt included.
        do_sample: sample; otherwise pick the likeliest token, the lowest id among equals.
        temperature: logits are divided by it; 0 means greedy, even with `do_sample`.
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: keep the smallest set of likeliest tokens whose probabilities add up to at least p.
        min_p: keep tokens at least p times as likely as the likeliest.
        repetition_penalty: divides positive and multiplies negative logits of tokens that occur already.
        num_beams: number of beams; 1 for no beam search.
        stop_strings: texts that end a sequence.
        eos_token_id: tokens that end a sequence.
        pad_token_id: has no influence on the text; None for 0.
        bos_token_id: the token that an empty prompt becomes.
        seed: random seed for sampling; every text has a generator of its own, see `seed_of`.
        extra: other fields of `GenerationConfig` that change the text; transformers computes them.
        structure: the form that the whole text has, see `structured.py`; None for any.
        rules: biases, penalties and log-probabilities of single tokens, see `token_rules.py`; None for none.
        explicit: names of the fields that were set and are not defaults.

    Raises:
        UsageProblem: an invalid value.
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
    structure: Structure | None = None
    rules: TokenRules | None = None
    explicit: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        for name, value in _values({name: getattr(self, name) for name in KINDS}).items():
            object.__setattr__(self, name, value)
        for name, least, most in RANGES:
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise UsageProblem(f"invalid {name} {value}", hint=f"give at least {least:g} and at most {most:g}")

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is picked."""
        return not self.do_sample or self.temperature == 0

    @property
    def needs_processors(self) -> bool:
        """Whether a field is set that needs transformers' logits processors."""
        return bool(self.extra.keys() - BEAMS_ONLY)

    def seed_of(self, sample: int) -> np.random.SeedSequence:
        """The seed of a sample: `seed`, then independent ones of numpy's `SeedSequence(seed, spawn_key=(sample,))`."""
        return np.random.SeedSequence(self.seed, spawn_key=(sample,) if sample else ())

    def new_tokens(self, prompt_tokens: int) -> int:
        """Maximum number of new tokens after a prompt; 0 if `max_length` leaves no room."""
        if self.max_new_tokens is not None:
            return self.max_new_tokens
        if self.max_length is not None:
            return max(self.max_length - prompt_tokens, 0)
        return DEFAULT_NEW_TOKENS

    @classmethod
    def of(cls, folder: str | Path, **overrides: Any) -> GenerationSettings:
        """The settings in a folder's `generation_config.json`, replaced by `overrides`.

        These are fields of `GenerationConfig`, None if not given. Without such a file those of `config.json` count, as
        transformers' `from_model_config` reads them; with one, special tokens that it lacks may be there. Raises
        MalformedInput for an invalid value in a file, UsageProblem for an invalid override.
        """
        folder = path_of(folder, "folder")
        file, path = folder / GENERATION_CONFIG, folder / CONFIG
        config = generation_fields(read_json(path)) if path.is_file() else {}
        if file.is_file():
            return cls.of_config(read_json(file), config).but(**overrides)
        return cls.of_config(config, {}, CONFIG).but(**overrides)

    @classmethod
    def of_config(
        cls, fields: Mapping[str, Any], config: Mapping[str, Any], file: str = GENERATION_CONFIG
    ) -> GenerationSettings:
        """The settings of a `GenerationConfig` (None: not set), and `config` may have end tokens; MalformedInput."""
        given = {name: value for name, value in fields.items() if value is not None}
        try:
            return cls()._changed({**{name: config.get(name) for name in SPECIAL_TOKENS}, **given})
        except UsageProblem as error:
            hint = (
                "fix or remove the file"
                if file == GENERATION_CONFIG
                else f"correct it, or write a `{GENERATION_CONFIG}`"
            )
            raise MalformedInput(f"`{file}`: {error.message}", hint=hint) from error

    def but(self, **changes: Any) -> GenerationSettings:
        """A copy with the given fields, but None, replaced; UsageProblem for an unknown, unused or invalid field."""
        require_known(name for name, value in changes.items() if value is not None)
        if (changes.get("num_return_sequences") or 1) != 1:
            problem = "`num_return_sequences` is not a field of `GenerationSettings`, which are those of one text"
            raise UsageProblem(problem, hint="give it to `generate` or to the pipeline")
        if name := next((name for name in RETURNED if changes.get(name)), ""):
            raise UsageProblem(f"`{name}` has no effect here: only texts and tokens are returned", hint="leave it out")
        return self._changed(changes)

    def _changed(self, changes: Mapping[str, Any]) -> GenerationSettings:
        """As `but`, ignoring fields of a file that have no effect here."""
        given = {name: value for name, value in changes.items() if value is not None}
        objects = {name: given.pop(name, getattr(self, name)) for name in OBJECTS}
        if given.get("max_new_tokens") is None and given.get("max_length") is not None:
            given["max_new_tokens"] = None  # the latest setting counts
        values = _values({name: value for name, value in given.items() if name in KINDS})
        explicit = self.explicit | {name for name, value in given.items() if value is not None}
        extra = {**self.extra, **{name: given[name] for name in EXTRA if name in given}}
        extra = {name: value for name, value in extra.items() if value != EXTRA.get(name)}
        return replace(self, **values, extra=extra, **objects, explicit=explicit)


def require_known(names: Iterable[str], others: Iterable[str] = ()) -> None:
    """Raises UsageProblem, with the closest name as hint, for no field of `GenerationConfig`, as a typo is."""
    known = {*KINDS, *EXTRA, *OBJECTS}
    names = set(names)
    if elsewhere := sorted(names & ELSEWHERE.keys()):
        raise UsageProblem(f"`{elsewhere[0]}` is not a generation setting", hint=ELSEWHERE[elsewhere[0]])
    if unknown := sorted(names - known):
        from transformers import GenerationConfig  # noqa: PLC0415 - takes seconds, and only other fields need it

        known |= GenerationConfig().to_dict().keys()
    for name in unknown:
        if name not in known:
            near = difflib.get_close_matches(name, known | set(others), 1)
            hint = f"did you mean `{near[0]}`?" if near else "see transformers' `GenerationConfig`"
            raise UsageProblem(f"`{name}` is not a generation setting", hint=hint)


def require_settings(settings: Any) -> GenerationSettings:
    """Returns `settings`; raises UsageProblem if it is a dict, or transformers' `GenerationConfig`."""
    if not isinstance(settings, GenerationSettings):
        problem = f"`settings` is {kind_of(settings)}, not a `GenerationSettings`"
        raise UsageProblem(problem, hint="give `model.defaults.but(max_new_tokens=20, …)`")
    return settings


# field, minimum and maximum; NaN is outside every range
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

# fields of `GenerationConfig` that change what transformers returns, and do nothing here
RETURNED = ("output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate")
IN_PROMPT = "give it in a prompt of `generate`: `Prompt(text, %s)`"
DTYPES = "graphs compute in float32; `llmconv export --dtype` sets how weights are stored"
TEXTS = "texts and chats are the argument `prompts` of `generate`, which may be a single one"

# names from transformers' pipeline and other libraries, and what to use instead
ELSEWHERE = {
    **dict.fromkeys(("tokenizer", "device"), "give it to `generate`, `pipeline` or `TextModel.open`"),
    "device_map": "one process runs the whole model; `llmconv export --stages` splits its graphs",
    **dict.fromkeys(("torch_dtype", "dtype"), DTYPES),
    "streamer": "give it to `generate`, to `TextModel.stream` or to the pipeline",
    "is_sample_acceleration": "graphs of `llmconv export --postprocess` choose tokens by themselves; leave it out",
    "model_kwargs": "pass its fields as keyword arguments",
    **dict.fromkeys(("text", "texts", "message", "messages"), TEXTS),
    **dict.fromkeys(("image", "images"), IN_PROMPT % "images=[PATH]"),
    **{name: IN_PROMPT % f"{name}=…" for name in ("embeddings", "placeholder", "inputs")},
    "adapters": "give one as `adapter`; `merge_lora` merges several",
    "stream": "give `on_piece` or a `streamer` to `generate`, or iterate over `TextModel.stream`",
    "prompt": "did you mean `prompts`?",
    "stop": "did you mean `stop_strings`?",
    "max_tokens": "did you mean `max_new_tokens`?",
}


def _integer(value: Any) -> int:
    """An integer, also written as `20.0` or `"20"`, as in some files."""
    if isinstance(value, str) or (isinstance(value, float) and value.is_integer()):
        return int(value)
    return operator.index(_number(value))


def _number(value: Any) -> Any:
    if isinstance(value, bool):
        raise TypeError("a bool is not a number")
    return value


def _real(value: Any) -> float:
    return float(_number(value))


def _flag(value: Any) -> bool:
    if value not in (True, False) or isinstance(value, float):
        raise TypeError(f"{value!r:.40} is neither True nor False")
    return bool(value)


def _tokens(value: Any) -> frozenset[int]:
    return frozenset(map(_integer, value if isinstance(value, list | tuple | set | frozenset) else (value,)))


def _texts(value: Any) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else tuple(value)
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("a stop string is a text")
    return texts


# field to the function that converts a value of a file or an option
KINDS: dict[str, Any] = {
    "max_new_tokens": _integer,
    "max_length": _integer,
    "do_sample": _flag,
    "temperature": _real,
    "top_k": _integer,
    "top_p": _real,
    "min_p": _real,
    "repetition_penalty": _real,
    "num_beams": _integer,
    "stop_strings": _texts,
    "eos_token_id": _tokens,
    "pad_token_id": _integer,
    "bos_token_id": _integer,
    "seed": _integer,
}
# fields that llmconv's own loop does not implement, with their neutral value, which takes back that of a file
EXTRA = {name: neutral for name, neutral in GENERATION.items() if name not in KINDS}
OBJECTS = ("structure", "rules")  # fields that no file has
OPTIONAL = {"max_new_tokens", "max_length", "min_p", "pad_token_id", "bos_token_id"}  # fields that may be None


def _values(given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields, converted to their types; raises UsageProblem for a value of the wrong type."""
    values = {}
    for name, value in given.items():
        try:
            values[name] = None if value is None and name in OPTIONAL else KINDS[name](value)
        except (TypeError, ValueError, OverflowError) as error:
            problem = f"invalid value for `{name}`: {value!r:.40} ({kind_of(value)})"
            raise UsageProblem(problem, hint=f"see `{name}` of transformers' `GenerationConfig`") from error
    return values


SHORT = reprlib.Repr()  # values on a line: of a list that a model folder brings, only the beginning
SHORT.maxlist = SHORT.maxdict = 8
SHORT.maxstring = SHORT.maxother = 60


def settings_fields(settings: GenerationSettings) -> dict[str, Any]:
    """All settings by name, sets as sorted lists, and with the other fields of `GenerationConfig` that are set."""
    fields = {name: value for name, value in asdict(settings).items() if name not in ("extra", "explicit", *OBJECTS)}
    ends = sorted(settings.eos_token_id)
    form = {"structure": settings.structure.name} if settings.structure else {}
    return {**fields, "eos_token_id": ends, "stop_strings": list(settings.stop_strings), **settings.extra, **form}


def settings_line(settings: GenerationSettings) -> str:
    """The settings that decide about the text, on one line."""
    parts = ["greedy" if settings.num_beams == 1 else "beam search"]
    if not settings.is_greedy:
        given = {name: getattr(settings, name) for name in ("temperature", "top_k", "top_p", "min_p", "seed")}
        parts = ["sampling", *(f"{name} {value}" for name, value in given.items() if value is not None)]
    if settings.num_beams > 1:
        parts.append(f"num_beams {settings.num_beams}")
    if settings.repetition_penalty != 1:
        parts.append(f"repetition_penalty {settings.repetition_penalty}")
    length = "max_length" if settings.max_new_tokens is None else "max_new_tokens"
    parts.append(f"{length} {getattr(settings, length)}")
    parts += [f"{name} {SHORT.repr(value)}" for name, value in sorted(settings.extra.items())]
    if settings.structure:
        parts.append(f"form by `{settings.structure.name}`")
    if settings.stop_strings:
        parts.append(f"stop {SHORT.repr(list(settings.stop_strings))}")
    return f"settings: {', '.join(parts)}"
