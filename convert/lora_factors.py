"""lora_factors: the LoRA factors of an adapter, for the optional inputs of graphs; adapter_file: a file of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from llmconv.checkpoint import open_checkpoint
from llmconv.convert.adapters.base_checks import warn_of_origin
from llmconv.convert.adapters.low_rank_sum import LoraProduct
from llmconv.convert.adapters.merging import merged
from llmconv.convert.adapters.targets import WeightChange
from llmconv.convert.opening_adapters import open_adapters
from llmconv.errors import InputRefused, UnsupportedInput, listing
from llmconv.output.manifest import graph_entries
from llmconv.progress import warn_all
from llmconv.runtime.extra_inputs import factor_names
from llmconv.runtime.onnxruntime.guard import load_guarded
from llmconv.runtime.onnxruntime.lora_names import declared_factors, encode_adapter, module_of, require_factors
from llmconv.tensors import Array

MERGE = "merge it into a new folder: `llmconv merge-lora BASE ADAPTER -o OUT`"


def lora_factors(folder: Path, adapter: str | Path, alpha: float | None = None) -> dict[str, Array]:
    """A [rank, in] and B [out, rank], times the scale, of every module by input name, float32.

    `folder` is the base; `alpha` is `lora_alpha` if the files lack it. Raises InputRefused for missing files,
    MalformedInput for another base, UnsupportedInput for changes other than products of two factors.
    """
    base = open_checkpoint(folder)
    opened = open_adapters([adapter], (), base, alpha)
    _, edits = merged(base, opened)
    if replaced := sorted({*edits.whole, *edits.tokens}):
        raise UnsupportedInput(f"the adapter replaces {listing(replaced)}, which graphs map from the base", hint=MERGE)
    warn_all((*warn_of_origin(base, opened, str(folder)), *edits.warnings))
    factors: dict[str, Array] = {}
    for name, changes in edits.changes.items():
        if not name.endswith(".weight"):
            raise UnsupportedInput(f"the adapter changes `{name}`, which is not the matrix of a module", hint=MERGE)
        pair = _stacked(name, changes)
        factors |= zip(factor_names(name.removesuffix(".weight")), pair, strict=True)
    return factors


def adapter_file(folder: Path, adapter: str | Path, alpha: float | None = None) -> tuple[tuple[str, ...], bytes]:
    """The modules of an adapter, and the content of onnxruntime's file for the graphs in the base's folder.

    `folder` has graphs of `export --lora-inputs` (else InputRefused). Other arguments and errors as in `lora_factors`.
    """
    declared = [declared_factors(load_guarded(folder / entry.files[0])) for entry in graph_entries(folder)]
    if not (common := set.intersection(*map(set, declared)) if declared else set[str]()):
        raise InputRefused(
            f"`{folder}` has no graphs with inputs for LoRA factors",
            hint=f"`llmconv export {folder} --lora-inputs all-linear`",
        )
    factors = lora_factors(folder, adapter, alpha)
    require_factors(factors, {name: declared[0][name] for name in common})
    return tuple(dict.fromkeys(map(module_of, factors))), encode_adapter(factors)


def _stacked(name: str, changes: Sequence[WeightChange]) -> tuple[Array, Array]:
    """A and B of all products of a weight; B·A is their sum."""
    products = [change for change in changes if isinstance(change, LoraProduct)]
    if len(products) < len(changes):
        raise UnsupportedInput(
            f"the adapter's update of `{name}` is not a product of two factors, as of LoRA and rsLoRA", hint=MERGE
        )
    a = [product.a.read().astype(np.float32) for product in products]
    b = [(product.b.read().astype(np.float64) * product.scale).astype(np.float32) for product in products]
    return np.concatenate(a), np.concatenate(b, axis=1)
