"""The factors of adapters that are not PEFT's, brought under the names that PEFT gives them.

Whatever a conversion does to the rows of a weight it does to the rows of its B (and of DoRA's magnitude); A stays.
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
from llmconv.convert.algebra.operations import LAYER_NUMBER, LISTED, listing
from llmconv.errors import InputRefused, MalformedInput
from llmconv.tensors import LazyTensor

RowTransform = Callable[[LazyTensor], LazyTensor]

PARTS = {"a": "a", "b": "b", "lora_a": "a", "lora_b": "b", "m": "m", "magnitude": "m"}
"""What the halves of a pair are called, and DoRA's magnitude."""


@dataclass(frozen=True)
class ForeignPair:
    """The low-rank change of one weight.

    Attributes:
        a: r×in.
        b: out×r.
        magnitude: one number per output; only with DoRA.
        joined: pairs that it was made of.
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
        """The factors with `rows` done to what has a row per output."""
        return replace(self, b=rows(self.b), magnitude=self.magnitude and rows(self.magnitude))


def pair_up(tensors: Mapping[str, LazyTensor], sign: re.Pattern[str], source: str) -> dict[str, ForeignPair]:
    """The factors by module, of the tensors whose names `sign` matches with the groups `module` and `part`.

    Raises:
        MalformedInput: half a pair, one that does not fit, or one name twice.
    """
    found: dict[str, dict[str, LazyTensor]] = {}
    for name, tensor in tensors.items():
        if match := sign.fullmatch(name):
            parts, part = found.setdefault(match["module"], {}), PARTS[match["part"].lower()]
            if part in parts:
                raise MalformedInput(
                    f"`{source}` holds `{name}` twice, under different names", hint="save the adapter again, alone"
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
    """The factors by the module that `table` has for theirs, with `{}` for the number of a layer.

    Args:
        factors: by module.
        table: module to module.
        source: file or folder name for error messages.
        what: whose names the table has.

    Raises:
        MalformedInput: modules that no row matches; lists them with the closest names.
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
    """The error for names that have no place, with the closest that have one."""
    options = [name.replace("{}", "0") for name in known]
    lines = []
    for name in names[:LISTED]:
        close = get_close_matches(re.sub(LAYER_NUMBER, "0", name), options, n=1, cutoff=0.5)
        lines.append(f"`{name[:200]}`" + (f" (close: `{close[0]}`)" if close else ""))
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return MalformedInput(
        f"`{source}` holds {len(names)} names that {what} does not have: {', '.join(lines)}{more}",
        hint="the adapter is of another model than the base, or of a kind that is not known",
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
    """The adapter that these factors are.

    Args:
        files: with the tensors; all in one folder.
        settings: the file with the config, where there is one.
        fields: `r`, `lora_alpha` and others that PEFT has, as far as the files tell them.
        factors: by Hugging Face's module.
        alpha: `lora_alpha` where the files do not carry it.
        others: further tensors under PEFT's names.
        notes: what a user should know, one line each.

    Raises:
        InputRefused: nobody says what alpha is.
        MalformedInput, UnsupportedInput: see `open_adapter`.
    """
    said = fields.get("lora_alpha")
    if factors and said is None and alpha is None:
        ranks = listing([str(rank) for rank in sorted({own.rank // own.joined for own in factors.values()})])
        pairs = sum(own.joined for own in factors.values())
        raise InputRefused(
            f"`{files[0].name}` holds {pairs} LoRA pairs of rank {ranks}, but not the `lora_alpha` of their training",
            hint="give it with `--alpha`; the update is B·A·alpha/rank",
        )
    config: dict[str, Any] = {"peft_type": "LORA", **fields}
    if any(own.magnitude is not None for own in factors.values()):
        config["use_dora"] = True
    own_alpha = said if said is not None else alpha
    if isinstance(own_alpha, int | float):
        joined = {re.escape(module): own for module, own in factors.items() if own.joined > 1}
        config["rank_pattern"] = {module: own.rank for module, own in joined.items()}
        config["alpha_pattern"] = {module: own_alpha * own.joined for module, own in joined.items()}
    tensors = {**peft_names(factors), **(others or {})}
    parsed = parse_config(config, alpha)
    parsed = replace(parsed, warnings=(*parsed.warnings, *notes))
    return replace(to_adapter(files[0].parent, tuple(files), parsed, tensors), settings=settings or files[0])
