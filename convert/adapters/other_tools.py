"""Shared parts of LoRA adapters that are not PEFT's, as `ADAPTER` in each `convert/formats/<name>/adapter.py`.

They pair A with B, rename the factors to Hugging Face names, and make an `Adapter`. A conversion that reorders or
splits the rows of a weight does the same to B (and to DoRA's magnitude); A stays.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from llmconv.convert.adapters.adapter import Adapter
from llmconv.convert.adapters.lora_config import parse_config
from llmconv.convert.adapters.peft_file import to_adapter
from llmconv.convert.algebra import LAYER_NUMBER, concat, find_row, permute_rows
from llmconv.errors import InputRefused, MalformedInput, UnsupportedInput, listing, nearest
from llmconv.tensors import Array, DType, LazyTensor

PARTS = {"a": "a", "b": "b", "lora_a": "a", "lora_b": "b", "m": "m", "magnitude": "m"}
"""Names of A, of B, and of DoRA's magnitude."""


@dataclass(frozen=True)
class ForeignPair:
    """The factors of one weight: A r×in, B out×r, DoRA's magnitude (out); `joined`: number of pairs in this one."""

    a: LazyTensor
    b: LazyTensor
    magnitude: LazyTensor | None = None
    joined: int = 1

    @property
    def rank(self) -> int:
        return self.b.shape[-1]

    def with_rows(self, rows: Callable[[LazyTensor], LazyTensor]) -> ForeignPair:
        """The factors with `rows` applied to B and the magnitude, which have a row per output."""
        return replace(self, b=rows(self.b), magnitude=self.magnitude and rows(self.magnitude))


def pair_up(tensors: Mapping[str, LazyTensor], sign: re.Pattern[str], source: str) -> dict[str, ForeignPair]:
    """The factors by module, by the groups `module` and `part` of `sign`; MalformedInput: half a pair, a mismatch."""
    found: dict[str, dict[str, LazyTensor]] = {}
    for name, tensor in tensors.items():
        if match := sign.fullmatch(name):
            parts, part = found.setdefault(match["module"], {}), PARTS[match["part"].lower()]
            if part in parts:
                raise MalformedInput(
                    f"`{source}` contains `{name}` twice, under different names", hint="save the adapter again, alone"
                )
            parts[part] = tensor
    for module, parts in found.items():
        if absent := [part for part in "ab" if part not in parts]:
            raise MalformedInput(
                f"`{source}` lacks {absent[0].upper()} of `{module}`",
                hint="the file is incomplete; save or copy the adapter again",
            )
        a, b = parts["a"].shape, parts["b"].shape
        if len(a) != 2 or len(b) != 2 or a[0] != b[1] or 0 in (*a, *b):
            raise MalformedInput(
                f"A of `{module}` in `{source}` has shape {list(a)}, B {list(b)}: they make no product",
                hint="the file is damaged, or a shard of a larger one; copy the adapter again",
            )
    return {module: ForeignPair(parts["a"], parts["b"], parts.get("m")) for module, parts in found.items()}


def renamed(
    factors: Mapping[str, ForeignPair], names: Mapping[str, str | None], source: str, what: str
) -> dict[str, ForeignPair]:
    """The factors by the targets of their weights in the table `names`; MalformedInput, with similar names, for others.

    `{}` is the number of a layer, and `what` the owner of the names.
    """
    homes: dict[str, str | None] = {}
    for module in factors:
        row, number = find_row(f"{module}.weight", names)
        target = names[row] if row else None
        homes[module] = target and target.format(number).removesuffix(".weight")
    if unknown := sorted(module for module, home in homes.items() if home is None):
        known = [name.removesuffix(".weight") for name, target in names.items() if target]
        raise unplaced(unknown, known, source, what)
    if len(set(homes.values())) < len(homes):
        raise MalformedInput(
            f"`{source}` holds two pairs for one module", hint="two adapters are mixed in one file; save each alone"
        )
    return {home: factors[module] for module, home in homes.items() if home is not None}


def reordered(
    factors: Mapping[str, ForeignPair], sign: re.Pattern[str], order: Sequence[int]
) -> dict[str, ForeignPair]:
    """The factors with the rows of modules that `sign` finds in another order; ValueError if groups do not fit."""
    turned = {module: own for module, own in factors.items() if sign.search(module)}
    rows = {module: own.with_rows(lambda rows: permute_rows(rows, order)) for module, own in turned.items()}
    return {**factors, **rows}


def unplaced(names: Sequence[str], known: Iterable[str], source: str, what: str) -> MalformedInput:
    """The error for unexpected `names`, with similar ones of `known`, whose owner is `what`."""
    lines = nearest(names, [name.replace("{}", "0") for name in known], lambda name: re.sub(LAYER_NUMBER, "0", name))
    return MalformedInput(
        f"`{source}` contains {len(names)} unexpected keys, which {what} does not have: {lines}",
        hint="the adapter is of another model than the base, or of an unknown kind",
    )


def as_adapter(
    files: Sequence[Path],
    settings: Path | None,
    fields: Mapping[str, Any],
    factors: Mapping[str, ForeignPair],
    alpha: float | None = None,
    others: Mapping[str, LazyTensor] | None = None,
    notes: Sequence[str] = (),
) -> Adapter:
    """The Adapter of `files` with these factors by module, other tensors (PEFT's names), and warnings (`notes`).

    `fields` are those of PEFT's config that the files contain, `alpha` is `lora_alpha` if they lack it (InputRefused if
    it is unknown); other errors as in `open_adapter`.
    """
    own_alpha = alpha if (stated := fields.get("lora_alpha")) is None else stated
    if factors and own_alpha is None:
        ranks = listing([str(rank) for rank in sorted({own.rank // own.joined for own in factors.values()})])
        pairs = sum(own.joined for own in factors.values())
        raise InputRefused(
            f"`{files[0].name}` contains {pairs} LoRA pairs of rank {ranks}, but not their `lora_alpha`",
            hint="give it with `--alpha`; the update is B·A·alpha/rank",
        )
    config: dict[str, Any] = {"peft_type": "LORA", **fields}
    if any(own.magnitude is not None for own in factors.values()):
        config["use_dora"] = True
    if isinstance(own_alpha, int | float):
        joined = {re.escape(module): own for module, own in factors.items() if own.joined > 1}
        config["rank_pattern"] = {module: own.rank for module, own in joined.items()}
        power = 0.5 if fields.get("use_rslora") else 1
        config["alpha_pattern"] = {module: own_alpha * own.joined**power for module, own in joined.items()}
    tensors = dict(others or {})
    for module, own in factors.items():
        tensors |= {f"{module}.lora_A.weight": own.a, f"{module}.lora_B.weight": own.b}
        if own.magnitude is not None:
            tensors[f"{module}.lora_magnitude_vector"] = own.magnitude
    parsed = parse_config(config, alpha)
    parsed = replace(parsed, warnings=(*parsed.warnings, *notes))
    return replace(to_adapter(files[0].parent, tuple(files), parsed, tensors), settings=settings or files[0])


JoinRows = Callable[[Sequence[LazyTensor]], LazyTensor]


def join_modules(
    factors: Mapping[str, ForeignPair],
    parts: Sequence[str],
    whole: str,
    counts: Sequence[int],
    source: str,
    combine: JoinRows = lambda rows: concat(rows, 0),
) -> dict[str, ForeignPair]:
    """The factors with those of `parts` (in row order, each of `counts` rows) of each layer as one pair of `whole`.

    Its A stacks the A of the trained parts, its B is block-diagonal (rows as `combine` joins them). Raises
    MalformedInput for a shape mismatch, UnsupportedInput for parts of different ranks, or DoRA on some of them only.
    """
    result: dict[str, ForeignPair] = {}
    for module, own in factors.items():
        last = next((part for part in parts if module.endswith(f".{part}")), "")
        root = module.removesuffix(last)
        if not last:
            result[module] = own
        elif f"{root}{whole}" not in result:
            found = [factors.get(f"{root}{part}") for part in parts]
            result[f"{root}{whole}"] = joined_pair(f"{root}{whole}", found, counts, source, combine)
    return result


def joined_pair(
    module: str,
    found: Sequence[ForeignPair | None],
    counts: Sequence[int],
    source: str,
    combine: JoinRows = lambda rows: concat(rows, 0),
) -> ForeignPair:
    """The pair of the matrix `module` from those of its parts, None for one without; see `join_modules`."""
    trained = [part for part in found if part is not None]
    first = trained[0]
    odd = [part for part, count in zip(found, counts, strict=True) if part and part.b.num_rows != count]
    if odd or any(part.a.shape[1] != first.a.shape[1] for part in trained):
        raise MalformedInput(
            f"the parts of `{module}` in `{source}` have other sizes than the base's, such as B "
            f"{list((odd or trained)[0].b.shape)}",
            hint="the adapter was trained on another model",
        )
    magnitudes = [part.magnitude for part in trained if part.magnitude is not None]
    if len({(part.rank, part.a.dtype, part.b.dtype) for part in trained}) > 1 or len(magnitudes) not in (0, len(found)):
        raise UnsupportedInput(
            f"the parts of `{module}` in `{source}` are of different kinds, and the base has them in one matrix",
            hint="merge it with the program that trained it",
        )
    rank = first.rank * len(trained)
    blocks, column = [], 0
    for part, count in zip(found, counts, strict=True):
        blocks.append(padded_columns(part.b if part else None, column, (count, rank), first.b.dtype))
        column += part.rank if part else 0
    return ForeignPair(
        concat([part.a for part in trained], 0),
        combine(blocks),
        combine(magnitudes) if magnitudes else None,
        len(trained),
    )


def padded_columns(part: LazyTensor | None, column: int, shape: tuple[int, int], dtype: DType) -> LazyTensor:
    """Zeros of `shape` with `part` [rows, columns] in the columns from `column` on; zeros alone if `part` is None."""

    def rows(start: int, stop: int) -> Array:
        whole = np.zeros((stop - start, shape[1]), dtype.numpy)
        if part is not None:
            whole[:, column : column + part.shape[1]] = part.rows(start, stop)
        return whole

    return LazyTensor(dtype, shape, rows)


NAMES = {  # their fields in the configs of transformers
    "hidden": ("hidden_size", "n_embd"),
    "queries": ("num_attention_heads", "n_head"),
    "keys": ("num_key_value_heads", "num_kv_heads"),
    "dim": ("head_dim",),
    "inner": ("intermediate_size", "n_inner", "ffn_hidden_size"),
}


@dataclass(frozen=True)
class LayerSizes:
    """Heads of queries and of keys/values, elements of a head, rows of the feed-forward."""

    queries: int
    keys: int
    dim: int
    inner: int = 0

    @property
    def attention(self) -> tuple[int, int, int]:
        return self.queries * self.dim, self.keys * self.dim, self.keys * self.dim


def sizes_of(config: Mapping[str, Any], source: str) -> LayerSizes:
    """The sizes in a `config.json`; InputRefused if they are missing or impossible."""
    found = {size: next((config[name] for name in names if config.get(name)), 0) for size, names in NAMES.items()}
    if all(type(value) is int and 0 <= value < 1 << 31 for value in found.values()) and found["queries"]:
        dim = found["dim"] or found["hidden"] // found["queries"]
        if dim and not dim % 2:
            return LayerSizes(
                found["queries"], found["keys"] or found["queries"], dim, found["inner"] or 4 * found["hidden"]
            )
    raise InputRefused(
        f"the `config.json` of `{source}` does not contain the sizes of its heads, or an odd one",
        hint="give the model's own `config.json` (of an adapter: the base that it was trained on, with its own)",
    )
