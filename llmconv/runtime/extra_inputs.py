"""The inputs of a model: names of its cache, and ExtraInput, any other than tokens, mask, positions and cache.

    kept by layer i            input                       output

    keys, values               past_key_values.{i}.key     present.{i}.key
    a convolution's window     past_conv.{i}               present_conv.{i}
    a recurrent state          past_recurrent.{i}          present_recurrent.{i}

Layer i may keep several, numbered after a second dot: `past_conv.{i}.{j}`. These are the names that transformers.js
pairs (its `getPastKeyValues`), and ORT-GenAI takes as templates (`past_conv_names`, `past_recurrent_names`).
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from llmconv.errors import InputRefused, UnsupportedInput, UsageProblem, first_line
from llmconv.tensors import BY_NAME, Array

CONVOLUTION, RECURRENT = "conv", "recurrent"
SCAN = "llmconv.scan"  # domain of the functions of recurrent layers in graphs, see `export/caches`

# groups: prefix, layer index
CACHE_NAME = re.compile(
    r"(past_key_values|present|past_conv|present_conv|past_recurrent|present_recurrent)\.(\d+)(?=\.|$)"
)
_PREFIXES = {"past_key_values": "present", "past_conv": "present_conv", "past_recurrent": "present_recurrent"}
_ORDER = ["present", "present_conv", "present_recurrent"]
CACHE_RANK = 4  # keys and values: `[batch, heads, tokens, size]`
# symbol of the length of a shared buffer, in past and present; the caller chooses it
MAX_LENGTH = "max_sequence_length"


def is_past(name: str) -> bool:
    return (match := CACHE_NAME.match(name)) is not None and match[1] in _PREFIXES


def is_present(name: str) -> bool:
    return (match := CACHE_NAME.match(name)) is not None and match[1] in _ORDER


def past_of(present: str) -> str:
    """The input of a cache output: `past_conv.3` for `present_conv.3`."""
    prefix, _, rest = present.partition(".")
    past = next(past for past, name in _PREFIXES.items() if name == prefix)
    return f"{past}.{rest}"


def present_of(past: str) -> str:
    """The output of a cache input: `present_conv.3` for `past_conv.3`."""
    prefix, _, rest = past.partition(".")
    return f"{_PREFIXES[prefix]}.{rest}"


def is_state(name: str) -> bool:
    """Whether the name is a state of fixed size, that is, neither keys nor values."""
    return CACHE_NAME.match(name) is not None and not name.startswith(("past_key_values.", "present."))


def is_recurrent(name: str) -> bool:
    return name.startswith(("past_recurrent.", "present_recurrent."))


def layer_of(name: str) -> int | None:
    """Layer index of a cache input or output; None for other names."""
    return int(match[2]) if (match := CACHE_NAME.match(name)) else None


def cache_order(name: str) -> tuple[int, int, str]:
    """Sort key of cache names: by layer; key, value, convolution, recurrent state."""
    if (match := CACHE_NAME.match(name)) is None:
        return (-1, 0, "")
    return (int(match[2]), _ORDER.index(_PREFIXES.get(match[1], match[1])), name)


# the only symbolic axes, with the names that clients (transformers.js, ORT-GenAI) expect
BATCH, SEQUENCE, PAST, TOTAL = "batch_size", "sequence_length", "past_sequence_length", "total_sequence_length"
FULL, SLIDING = "full_attention", "sliding_attention"  # transformers' types of layers with attention
SYMBOLS = (BATCH, SEQUENCE, PAST, TOTAL)
DTYPES = ("int64", "int32", "bool", "float32")
RESERVED = (
    *("input_ids", "inputs_embeds", "attention_mask", "position_ids", "write_indices", "cache", "cache_params"),
    "use_cache",
)

# an extra input of this name has several positions for each token, instead of the one that most graphs take
POSITIONS = "position_ids"
INPUTS_EMBEDS = "inputs_embeds"
# input with the index at which new tokens are written, int64 [batch]; named as in `TensorScatter`
WRITE_INDICES = "write_indices"
# optional input of the form that the CPU runs, int64 [1]: logits are computed for the new tokens from this one on,
# -1 for the last
LOGITS_FROM = "logits_from"
TOKEN_INPUTS = ("input_ids", INPUTS_EMBEDS, "attention_mask", POSITIONS, WRITE_INDICES)
DOCUMENT = "see docs/adding-a-family.md"


# most tokens of a prompt that run in one call, where they may run in several: attention needs a matrix of these by all
# tokens so far, which would take gigabytes for a long prompt, and more time
PART = 512


@dataclass(frozen=True)
class ModelCall:
    """The tokens of one call of a model."""

    input_ids: Array  # new tokens, int64 [batch, new tokens]
    attention_mask: Array  # of past and new tokens, int64 [batch, past + new tokens], 0 for padding
    position_ids: Array  # of the new tokens, int64 [batch, new tokens]
    last_only: bool = False  # only the last token's logits are read, so that those of the others may be left out
    in_parts: bool = False  # new tokens may run in several calls, each after those before it

    @property
    def arrays(self) -> tuple[Array, Array, Array]:
        return self.input_ids, self.attention_mask, self.position_ids

    @property
    def named(self) -> dict[str, Array]:
        """The arrays by the names of the inputs."""
        return dict(zip(("input_ids", "attention_mask", POSITIONS), self.arrays, strict=True))

    def after(self, length: int, first_position: int) -> ModelCall:
        """The same tokens after a prefix of `length` virtual tokens; `first_position` is that of the first real one."""
        mask = np.concatenate([np.ones((len(self.input_ids), length), dtype=np.int64), self.attention_mask], axis=1)
        return replace(self, attention_mask=mask, position_ids=self.position_ids + first_position)

    def width(self, values: ExtraValues) -> int:
        """New tokens per run: all, or of a long prompt that may run in parts at most `PART`, in equal parts."""
        new: int = self.input_ids.shape[1]
        return new if not self.in_parts or new <= PART or values.both_ways else -(-new // -(-new // PART))

    @property
    def sizes(self) -> dict[str, int]:
        """The size of every symbolic axis."""
        (rows, new), total = self.input_ids.shape, self.attention_mask.shape[1]
        return {BATCH: rows, SEQUENCE: new, PAST: total - new, TOTAL: total}


Hook = Callable[[ModelCall], Array]  # computes the value of an input for a call; of the input's dtype and axes
OfConfig = int | str | Callable[[Any], int]  # a number, the name of a field of the config, or a function of the config


@dataclass(frozen=True)
class ExtraInput:
    """An input that a family adds to its graphs; the eager model gets it as a keyword argument.

    Raises:
        UsageProblem: a name, an axis, a dtype or a default that no graph can have.
    """

    name: str  # its name, which is also that of the parameter of the model's `forward`
    # `BATCH`, `SEQUENCE` (new tokens), `PAST` and `TOTAL` (past and new tokens), or a fixed size: a number, the
    # name of a field of the config, or a function of the config
    axes: tuple[OfConfig, ...]
    dtype: str = "int64"  # `int64`, `int32`, `bool` or `float32`; the latter has the precision of the graphs
    # the value where a request gives none: one number for all elements, or a function of the call
    default: float | Hook = 0
    # which values a request may give: for integers their number (0 to `values - 1`), for floats their standard
    # deviation, which `verify` draws; as for a fixed axis. None: a function in `default` alone decides
    values: float | OfConfig | None = None
    repeats: bool = False  # new tokens have the last value that a request gave for its prompt, and not the default
    counts_on: bool = False  # new tokens have the next numbers after the largest that a request gave for its prompt
    # types of layers, as in `layer_types` of the config, in which neighbors whose value is not 0 attend to each
    # other in both directions; a call that contains them cannot be divided, and calls cannot be joined
    both_ways: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if problem := _problem(self):
            raise UsageProblem(f"the extra input `{self.name}` {problem}", hint=DOCUMENT)

    def resolved(self, config: Any) -> ExtraInput:
        """The input with numbers for fields and functions of `config`; UnsupportedInput if one is missing or fails."""
        axes = tuple(axis if axis in SYMBOLS else self._number(axis, config, "axis") for axis in self.axes)
        if min((axis for axis in axes if isinstance(axis, int)), default=1) < 1:
            raise UnsupportedInput(f"the extra input `{self.name}` has the shape {list(axes)}", hint=DOCUMENT)
        return replace(self, axes=axes, values=self.number_of_values(config))

    def number_of_values(self, config: Any) -> Any:
        """`values` as a number, or None; arguments and errors as for `resolved`."""
        return self.values if self.values is None else self._number(self.values, config, "number of values")

    def _number(self, given: Any, config: Any, kind: str) -> Any:
        try:
            found = given(config) if callable(given) else getattr(config, given) if isinstance(given, str) else given
        except Exception as error:  # a function of another package may raise anything
            raise UnsupportedInput(
                f"the extra input `{self.name}` has the {kind} `{given}`, which the config does not give: "
                f"{first_line(error)}",
                hint=f"an axis is one of {', '.join(SYMBOLS)}, a number, a field of the config, or a function of it",
            ) from error
        if isinstance(found, bool) or not isinstance(found, int | float) or (kind == "axis" and int(found) != found):
            raise UnsupportedInput(f"the extra input `{self.name}` has the {kind} {found!r}", hint=DOCUMENT)
        return found

    @property
    def is_fixed(self) -> bool:
        """Whether only one value is valid, so that no graph needs the input; for a resolved input."""
        single = self.dtype != "float32" and isinstance(self.values, int | float) and self.values <= 1
        return single and not callable(self.default)

    @property
    def by_token(self) -> bool:
        """Whether it has a value for each token."""
        return SEQUENCE in self.axes or TOTAL in self.axes

    def value(self, call: ModelCall) -> Array:
        """The default for a call; UnsupportedInput if the hook fails, or returns another dtype or shape."""
        if not callable(self.default):
            return np.full(self.shape(call), self.default, dtype=BY_NAME[self.dtype].numpy)
        try:
            found = np.asarray(self.default(call))
        except Exception as error:  # a hook of another package may raise anything
            message = f"the hook of the extra input `{self.name}` fails: {type(error).__name__}: {first_line(error)}"
            raise UnsupportedInput(message, hint=DOCUMENT) from error
        if problem := self.misfit(found, call):
            raise UnsupportedInput(f"the hook of the extra input `{self.name}` returns {problem}", hint=DOCUMENT)
        return found

    def shape(self, call: ModelCall) -> tuple[int, ...]:
        """Its shape in a call; for a resolved input."""
        return tuple(axis if isinstance(axis, int) else call.sizes[axis] for axis in self.declared)

    @property
    def declared(self) -> tuple[int | str, ...]:
        """Its axes as a graph declares them; for a resolved input."""
        return tuple(axis if isinstance(axis, int) else str(axis) for axis in self.axes)

    def misfit(self, array: Array, call: ModelCall) -> str:
        """Why an array cannot be its value in a call, in words; empty if it can."""
        wanted = self.shape(call)
        if array.dtype != BY_NAME[self.dtype].numpy or array.shape != wanted:
            pairs = zip(self.axes, wanted, strict=True)
            shape = ", ".join(f"{axis} = {size}" if axis in SYMBOLS else str(size) for axis, size in pairs)
            return f"{array.dtype} {list(array.shape)}, and not {self.dtype} [{shape}]"
        if self.dtype in ("int64", "int32") and array.size:
            low, high = int(array.min()), int(array.max())
            limit = self.values if isinstance(self.values, int) else None
            if low < 0 or (limit is not None and high >= limit):
                valid = "from 0 on" if limit is None else f"from 0 to {limit - 1}"
                return f"the value {low if low < 0 else high}, and not numbers {valid}"
        return ""


def _problem(extra: ExtraInput) -> str:
    """Why no graph can have an input, in words; empty if it can."""
    name, axes = extra.name, extra.axes
    if not isinstance(name, str) or not name.isidentifier():
        return "is not named like a parameter"
    if (name in RESERVED and name != POSITIONS) or name.startswith(("past_", "present")):
        return "has the name of an input that every graph has"
    if name == POSITIONS and len([axis for axis in axes if axis != BATCH]) < 2:
        return "needs several positions for each token: leave it out, and set `position_ids` of the input map instead"
    if extra.dtype not in DTYPES:
        return f"has the dtype `{extra.dtype}`: give {', '.join(DTYPES)}"
    if not isinstance(axes, tuple) or not all(isinstance(a, str | int) and a is not True or callable(a) for a in axes):
        return "needs a tuple of axes"
    if any(axes.count(symbol) > 1 for symbol in SYMBOLS):
        return "has the same axis twice"
    if extra.values is None and not callable(extra.default):
        return "has one constant value: give the number of `values`, or a function as `default`"
    if not callable(extra.default) and not isinstance(extra.default, int | float):
        return "has a default that is neither a number nor a function"
    return ""


def resolved_inputs(extras: Iterable[ExtraInput], config: Any) -> dict[str, ExtraInput]:
    """The inputs by name with numbers as sizes, without those of one valid value; UnsupportedInput as `resolved`."""
    return {extra.name: extra for extra in [one.resolved(config) for one in extras] if not extra.is_fixed}


def require_parameters(forward: Callable[..., Any], names: Collection[str]) -> None:
    """Raises UnsupportedInput if a model's `forward` lacks a parameter for an extra input, or needs another."""
    parameters = inspect.signature(forward).parameters.values()
    known = {parameter.name for parameter in parameters}
    positional = [one for one in parameters if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)]
    needed = [one.name for one in positional if one.default is one.empty]
    if missing := [name for name in needed if name not in (*RESERVED, *names, "past_key_values")]:
        problem = f"the model's `forward` needs `{missing[0]}`, which the input map does not declare"
        raise UnsupportedInput(problem, hint=f"add an `ExtraInput` to its row; {DOCUMENT}")
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            raise UnsupportedInput(
                f"the input map has the extra input `{name}`, which the model's `forward` does not take",
                hint=f"is it `{close[0]}`?" if close else f"leave it out of the input map; {DOCUMENT}",
            )


@dataclass(frozen=True)
class ExtraValues:
    """The values of the extra inputs in a call, given or default; UsageProblem for one that no request may give."""

    inputs: Mapping[str, ExtraInput] = field(default_factory=dict)
    given: Mapping[str, Array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.given:
            if name not in self.inputs:
                known = ", ".join(self.inputs) or "none"
                raise UsageProblem(f"the model has no extra input `{name}`", hint=f"its extra inputs: {known}")
            if PAST in self.inputs[name].axes:
                raise UsageProblem(f"`{name}` has an axis of past tokens and is computed", hint="leave it out")

    def of(self, call: ModelCall, whole: ModelCall | None = None, start: int = 0) -> dict[str, Array]:
        """The values of a call by name.

        `call` is part of the call `whole` that the arrays were given for (default: all of it), from index `start` of
        its new tokens. Raises as `ExtraInput.value`, and UsageProblem for an array of another dtype or shape.
        """
        return {name: self._value(name, extra, call, whole or call, start) for name, extra in self.inputs.items()}

    @property
    def both_ways(self) -> bool:
        """Whether tokens attend to each other in both directions, so that the call cannot be divided."""
        return any(bool(self.inputs[name].both_ways) and bool(array.any()) for name, array in self.given.items())

    def require_whole(self, most: int) -> None:
        """Raises InputRefused for a call whose tokens attend to later ones; `most` is the number that run together."""
        if self.both_ways:
            problem = f"tokens of images attend to later ones, and these graphs read {most} tokens at a time"
            raise InputRefused(problem, hint="export again with `--shapes dynamic`, or give a shorter prompt")

    def _value(self, name: str, extra: ExtraInput, call: ModelCall, whole: ModelCall, start: int) -> Array:
        if name not in self.given:
            return extra.value(call)
        array = self.given[name]
        if problem := extra.misfit(array, whole):
            raise UsageProblem(f"the value of `{name}` is {problem}", hint=DOCUMENT)
        return part(extra, array, call, start)


def part(extra: ExtraInput, array: Array, call: ModelCall, start: int) -> Array:
    """The values of an input in `call`, one of several consecutive calls, from those in all the calls together.

    `start` is the index of its first new token among the new tokens of all calls.
    """
    sizes = call.sizes
    cuts = {SEQUENCE: slice(start, start + sizes[SEQUENCE]), TOTAL: slice(sizes[TOTAL]), PAST: slice(sizes[PAST])}
    return array[tuple([cuts.get(str(axis), slice(None)) for axis in extra.axes])]


def grown(extra: ExtraInput, array: Array, sizes: Mapping[str, int]) -> Array:
    """The value of an input with larger symbolic axes: rows are copies of all rows in turn, other places are 0."""
    shape = [sizes.get(str(axis), size) for axis, size in zip(extra.axes, array.shape, strict=True)]
    if list(array.shape) == shape:
        return array
    result = np.zeros(shape, array.dtype)
    result[tuple(map(slice, array.shape))] = array
    if BATCH in extra.axes:
        rows = np.moveaxis(result, extra.axes.index(BATCH), 0)
        rows[:] = copied_rows(rows[: array.shape[extra.axes.index(BATCH)]], len(rows))
    return result


def copied_rows(array: Array, rows: int) -> Array:
    """The rows of an array, repeated in turn up to `rows`."""
    return array[np.arange(rows) % len(array)]


def with_past(inputs: Mapping[str, ExtraInput], values: Mapping[str, Array], past: int) -> dict[str, Array]:
    """Values of new tokens after `past`; those of `both_ways` for past tokens, too, left out where all are 0."""
    found = dict(values)
    for name in [name for name in values if inputs[name].both_ways]:
        array = found.pop(name)
        if array.any():
            found[name] = np.pad(array, ((0, 0), (past, 0)))
    return found


@dataclass(frozen=True)
class GivenInputs:
    """The values of one prompt of `tokens` tokens: arrays by name, without the axis of the batch."""

    tokens: int
    values: Mapping[str, Array] = field(default_factory=dict)

    @property
    def content(self) -> tuple[tuple[str, tuple[int, ...], bytes], ...]:
        """Equal for equal values."""
        return tuple((name, array.shape, array.tobytes()) for name, array in sorted(self.values.items()))


def batch_values(
    rows: Sequence[GivenInputs], call: ModelCall, longest: int, known: Mapping[str, ExtraInput]
) -> dict[str, Array]:
    """The values in one call of a batch, of the inputs that any of its prompts gives.

    `call` has a mask of all columns so far; `longest` is the number of columns of the padded prompts.
    """
    found = {}
    for name in dict.fromkeys(name for row in rows for name in row.values):
        found[name] = known[name].value(call).copy()
        for at, row in enumerate(rows):
            if name in row.values:
                _place(known[name], found[name], at, row.values[name], (longest - row.tokens, longest), call)
    return found


def _place(extra: ExtraInput, target: Array, row: int, given: Array, prompt: tuple[int, int], call: ModelCall) -> None:
    """Writes a prompt's value into its row; `prompt` is the range of its columns."""
    inner = [axis for axis in extra.axes if axis != BATCH]
    if BATCH in extra.axes:  # a slice, because an element is not a view
        target = np.moveaxis(target, extra.axes.index(BATCH), -1)[..., row : row + 1]
        given = given[..., None]
    starts = {SEQUENCE: call.sizes[PAST], TOTAL: 0}
    into, source = [slice(None)] * target.ndim, [slice(None)] * target.ndim
    for at, axis in enumerate(inner):
        if axis in starts:
            start, length = starts[str(axis)], target.shape[at]
            first, last = max(start, prompt[0]), min(start + length, prompt[1])
            into[at] = slice(max(first - start, 0), max(last - start, 0))
            source[at] = slice(max(first - prompt[0], 0), max(last - prompt[0], 0))
    target[tuple(into)] = given[tuple(source)]
    tokens = [at for at, axis in enumerate(inner) if axis in starts]
    if (extra.repeats or extra.counts_on) and len(tokens) == 1:
        at = tokens[0]
        new = max(starts[str(inner[at])] - prompt[1], 0)
        later = np.moveaxis(target, at, -1)[..., max(prompt[1] - starts[str(inner[at])], 0) :]
        if extra.repeats:
            later[...] = np.moveaxis(given, at, -1)[..., -1:]
        else:
            later[...] = given.max() + 1 + new + np.arange(later.shape[-1])


def is_token_input(name: str, rank: int) -> bool:
    """Whether an input, by name and rank, has tokens, their mask, one position each, or where they are written."""
    return name in TOKEN_INPUTS and (name != POSITIONS or rank < 3)


PIXEL_VALUES, IMAGE_FEATURES = "pixel_values", "image_features"
# further features, [tokens, layers * hidden], that are added to the outputs of the first layers of the decoder
DEEPSTACK_FEATURES = "deepstack_features"
AXES = 3  # of Qwen2-VL and later: time, row, column

# int64 [3, batch, new tokens], the same on all axes for text; after the prompt all count on from the largest position
ROTARY_AXES = ExtraInput(
    POSITIONS,
    (AXES, BATCH, SEQUENCE),
    default=lambda call: np.repeat(call.position_ids[None], AXES, axis=0),
    counts_on=True,
)

# number of layers of the decoder that get features of images added to their output, in all released Qwen3-VL
DEEPSTACK_LAYERS = 3
# features that are added to the output of each of the first layers, one layer after the other in the last axis
DEEPSTACK = ExtraInput(
    "deepstack_embeds",
    (BATCH, SEQUENCE, lambda config: DEEPSTACK_LAYERS * config.hidden_size),
    dtype="float32",
    values=1.0,
)


HIDDEN = "last_hidden_state"  # the output of graphs for an MTP head, what the output head reads
# the hidden state of the token before each, of the model or of the MTP head itself
PREVIOUS_HIDDEN = ExtraInput("previous_hidden_state", (BATCH, SEQUENCE, "hidden_size"), dtype="float32", values=1.0)


def embeds_in_layers(config: Any) -> bool:
    """Whether every layer also embeds the tokens, so that embeddings cannot stand in for them."""
    return bool(getattr(config.get_text_config(decoder=True), "hidden_size_per_layer_input", None))


FACTOR_A, FACTOR_B = ".lora_A.weight", ".lora_B.weight"


def factor_names(module: str) -> tuple[str, str]:
    return f"{module}{FACTOR_A}", f"{module}{FACTOR_B}"


def is_factor(name: str) -> bool:
    return name.endswith((FACTOR_A, FACTOR_B))
