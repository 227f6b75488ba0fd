"""Factors of adapters that are not PEFT's: pairs A with B, renames them, and makes an Adapter.

A conversion that reorders or splits the rows of a weight does the same to B (and to DoRA's magnitude); A stays.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from llmconv.convert.adapters.adapter import Adapter
from llmconv.convert.adapters.lora.config import parse_config
from llmconv.convert.adapters.peft_tensors import to_adapter
from llmconv.convert.algebra.operations import LAYER_NUMBER
from llmconv.errors import LISTED, InputRefused, MalformedInput, listing
from llmconv.tensors import LazyTensor

RowTransform = Callable[[LazyTensor], LazyTensor]

PARTS = {"a": "a", "b": "b", "lora_a": "a", "lora_b": "b", "m": "m", "magnitude": "m"}
"""Names of A, of B, and of DoRA's magnitude."""


@dataclass(frozen=True)
class ForeignPair:
    """The factors of one weight.

    Attributes:
        a: r×in.
        b: out×r.
        magnitude: one number per output; only with DoRA.
        joined: number of pairs that were joined into this one.
    """

    a: LazyTensor
    b: LazyTensor
    magnitude: LazyTensor | None = None
    joined: int = 1

    @property
    def rank(self) -> int:
        """r: the columns of B."""
        return self.b.shape[-1]

    def with_rows(self, rows: RowTransform) -> ForeignPair:
        """The factors with `rows` applied to B and the magnitude, which have a row per output."""
        return replace(self, b=rows(self.b), magnitude=self.magnitude and rows(self.magnitude))


def pair_up(tensors: Mapping[str, LazyTensor], sign: re.Pattern[str], source: str) -> dict[str, ForeignPair]:
    """The factors by module.

    Args:
        tensors: by name.
        sign: matches the names of factors, with the groups `module` and `part` (a key of `PARTS`); others are ignored.
        source: file name, for messages.

    Raises:
        MalformedInput: a missing half, a shape mismatch, or a duplicate key.
    """
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
        absent = [part for part in "ab" if part not in parts]
        if absent:
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
    factors: Mapping[str, ForeignPair], table: Mapping[str, str], source: str, what: str = "the adapter's format"
) -> dict[str, ForeignPair]:
    """The factors under new module names.

    Args:
        factors: by module.
        table: old to new module name, with `{}` for the number of a layer.
        source: file or folder name, for messages.
        what: owner of the old names, for messages.

    Raises:
        MalformedInput: modules that are not in the table; lists them with similar names.
    """
    homes = {module: _home(module, table) for module in factors}
    unknown = sorted(module for module, home in homes.items() if home is None)
    if unknown:
        raise unplaced(unknown, table, source, what)
    if len(set(homes.values())) < len(homes):
        raise MalformedInput(
            f"`{source}` holds two pairs for one module", hint="two adapters are mixed in one file; save each alone"
        )
    return {home: factors[module] for module, home in homes.items() if home is not None}


def _home(module: str, table: Mapping[str, str]) -> str | None:
    if module in table:
        return table[module]
    number = re.search(LAYER_NUMBER, f"{module}.")
    template = re.sub(LAYER_NUMBER, "{}", f"{module}.", count=1)[:-1]
    return table[template].format(number[0]) if number and template in table else None


def unplaced(names: Sequence[str], known: Iterable[str], source: str, what: str) -> MalformedInput:
    """The error for unexpected keys, with similar known names.

    Args:
        names: the unexpected names.
        known: the known names.
        source: file or folder name.
        what: owner of the known names.
    """
    options = [name.replace("{}", "0") for name in known]
    lines = []
    for name in names[:LISTED]:
        close = get_close_matches(re.sub(LAYER_NUMBER, "0", name), options, n=1, cutoff=0.5)
        lines.append(f"`{name[:200]}`" + (f" (close: `{close[0]}`)" if close else ""))
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return MalformedInput(
        f"`{source}` contains {len(names)} unexpected keys, which {what} does not have: {', '.join(lines)}{more}",
        hint="the adapter is of another model than the base, or of an unknown kind",
    )


def peft_names(factors: Mapping[str, ForeignPair]) -> dict[str, LazyTensor]:
    """The tensors under PEFT's names."""
    tensors: dict[str, LazyTensor] = {}
    for module, own in factors.items():
        tensors |= {f"{module}.lora_A.weight": own.a, f"{module}.lora_B.weight": own.b}
        if own.magnitude is not None:
            tensors[f"{module}.lora_magnitude_vector"] = own.magnitude
    return tensors


def as_adapter(
    files: Sequence[Path],
    settings: Path | None,
    fields: Mapping[str, Any],
    factors: Mapping[str, ForeignPair],
    alpha: float | None = None,
    others: Mapping[str, LazyTensor] | None = None,
    notes: Sequence[str] = (),
) -> Adapter:
    """The Adapter with these factors.

    Args:
        files: with the tensors; all in one folder.
        settings: the file with the config, if there is one.
        fields: `r`, `lora_alpha` and other fields of PEFT's config, as far as the files contain them.
        factors: by module, in Hugging Face names.
        alpha: `lora_alpha` if the files do not contain it.
        others: further tensors under PEFT's names.
        notes: warnings, one line each.

    Raises:
        InputRefused: alpha is unknown.
        MalformedInput, UnsupportedInput: see `open_adapter`.
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
        config["alpha_pattern"] = {module: own_alpha * own.joined for module, own in joined.items()}
    tensors = {**peft_names(factors), **(others or {})}
    parsed = parse_config(config, alpha)
    parsed = replace(parsed, warnings=(*parsed.warnings, *notes))
    return replace(to_adapter(files[0].parent, tuple(files), parsed, tensors), settings=settings or files[0])
