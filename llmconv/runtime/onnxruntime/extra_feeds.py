"""The extra inputs of a graph: those of the family's input map, with the sizes that the graph declares."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from llmconv.errors import UnsupportedInput
from llmconv.runtime.cache_names import is_past
from llmconv.runtime.extra_inputs import POSITIONS, SYMBOLS, ExtraInput
from llmconv.runtime.onnxruntime.device import INPUT_DTYPES
from llmconv.tensors import BY_NAME

TOKEN_INPUTS = ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "write_indices")

UNKNOWN = 1 << 31
"""Number of valid values where only the config class knows it; the graph itself refuses larger ones."""

INSTALL = "install the package whose input map declares it, or call `register_input_map`"


def is_token_input(name: str, rank: int) -> bool:
    """Whether an input has tokens, their mask, one position for each, or where they are written.

    Args:
        name: of the input.
        rank: number of its axes.
    """
    return name in TOKEN_INPUTS and (name != POSITIONS or rank < 3)


def extra_names(shapes: Mapping[str, Sequence[int | str]]) -> list[str]:
    """The names of a graph's inputs besides tokens, mask, one position for each token, and cache.

    Args:
        shapes: declared shapes of all inputs by name.
    """
    return [name for name, shape in shapes.items() if not is_token_input(name, len(shape)) and not is_past(name)]


def declared_extras(
    shapes: Mapping[str, Sequence[int | str]],
    types: Mapping[str, str],
    known: Callable[[], Sequence[ExtraInput]] | None,
) -> dict[str, ExtraInput]:
    """The extra inputs of a graph by name; an input of no input map is left out.

    Args:
        shapes: declared shapes of all inputs by name.
        types: onnxruntime's type names of the inputs.
        known: returns the extra inputs of the family.

    Raises:
        UnsupportedInput: the graph declares another rank, size or dtype than the input map.
    """
    names = extra_names(shapes)
    rows = {extra.name: extra for extra in known()} if names and known else {}
    return {name: _declared(rows[name], shapes[name], types[name]) for name in names if name in rows}


def _declared(extra: ExtraInput, shape: Sequence[int | str], kind: str) -> ExtraInput:
    wanted = BY_NAME[extra.dtype].numpy
    found = INPUT_DTYPES.get(kind)
    same_dtype = found is not None and (found == wanted.type or (wanted.kind == "f" and kind != "tensor(double)"))
    sizes = zip(extra.axes, shape, strict=False)
    same_sizes = all(axis in SYMBOLS or axis == size or not isinstance(axis, int) for axis, size in sizes)
    if len(shape) != len(extra.axes) or not same_dtype or not same_sizes:
        raise UnsupportedInput(
            f"the graph's input `{extra.name}` is {kind} {list(shape)}, and the input map declares {extra.dtype} "
            f"{[axis if isinstance(axis, str | int) else '…' for axis in extra.axes]}",
            hint="run `llmconv export` again",
        )
    axes = tuple(axis if axis in SYMBOLS else size for axis, size in zip(extra.axes, shape, strict=True))
    known = extra.values is None or isinstance(extra.values, int | float)
    return replace(extra, axes=axes, values=extra.values if known else UNKNOWN)


def require_known(shapes: Mapping[str, Sequence[int | str]], known: Mapping[str, ExtraInput], what: str) -> None:
    """Refuses to run a graph with an input whose value nothing computes.

    Args:
        shapes: declared shapes of the graph's inputs by name.
        known: its extra inputs by name.
        what: the graph in messages.

    Raises:
        UnsupportedInput: there is one; the message has its name.
    """
    if unknown := [name for name in extra_names(shapes) if name not in known]:
        raise UnsupportedInput(f"`{what}` has the input `{unknown[0]}`, which no input map declares", hint=INSTALL)
