"""MindFormers' LoRA (MindPET): pairs in a MindSpore `.ckpt` or safetensors, alone or next to the weights they change.

Layout (mindpet `delta/lora.py`, `LoRADense`): `<cell>.mindpet_delta_lora_a` (r×in) and `_b` (out×r), in other versions
`tk_delta_lora_a` or `lora_a`; the update is B·A·lora_alpha/r, and lora_alpha is in the run's YAML (`pet_config`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from llmconv.checkpoint import Checkpoint
from llmconv.convert.adapters.adapter import Adapter
from llmconv.convert.adapters.other_tools import (
    ForeignPair,
    LayerSizes,
    as_adapter,
    join_modules,
    pair_up,
    renamed,
    reordered,
    sizes_of,
    unplaced,
)
from llmconv.convert.adapters.peft_file import CONFIG
from llmconv.convert.algebra import find_row, fitting, interleave_rows
from llmconv.convert.formats import AdapterFormat
from llmconv.convert.formats.mindformers import families
from llmconv.convert.formats.mindformers.config import (
    DENSE,
    FUSED,
    LORA,
    MindFormersFamily,
    RunConfig,
    layout_of,
    read_run_config,
    split_qkv,
    unfuse,
)
from llmconv.convert.formats.mindformers.format import SUFFIXES, family_of, is_mindspore, open_parameters
from llmconv.errors import InputRefused, UnsupportedInput, word
from llmconv.tensors import LazyTensor

DESCRIPTION = "a LoRA of MindFormers"
HALF_PRECISION = 2.0**-7  # largest relative difference between two roundings of a number to half precision


def open_mindformers_adapter(path: Path, base: Checkpoint, alpha: float | None = None) -> Adapter:
    """Opens the LoRA pairs of a MindSpore checkpoint, a file or a run's folder; `alpha`: if no YAML declares it.

    Other tensors replace the base's; those of a whole model are only compared. Raises InputRefused without pairs or
    alpha, or if other weights differ from the base's, MalformedInput for names or shapes of another base.
    """
    found = open_parameters(path)
    run = read_run_config(path, {})
    if not (pairs := {name: tensor for name, tensor in found.tensors.items() if LORA.fullmatch(name)}):
        raise InputRefused(
            f"`{path.name}` holds {len(found.tensors)} tensors and no LoRA pair",
            hint=f"convert a whole model with `llmconv to-hf {word(path)} --config run.yaml -o OUT`",
        )
    others = {name: tensor for name, tensor in found.tensors.items() if name not in pairs}
    family, factors = family_of(pairs, path.name), pair_up(pairs, LORA, path.name)
    if (place := PLACES.get(family.build)) is None:
        raise UnsupportedInput(
            f"`{path.name}` holds LoRA pairs of a model whose code transformers lacks", hint="merge them where they are"
        )
    with fitting(f"the rows of `{path.name}` do not match the base's heads", "it was trained on another model"):
        placed = place(factors, run, sizes_of(base.config, base.path.name), family.names)
    notes = list(found.warnings)
    if any(f"{module}.weight" in others for module in factors):
        _require_base(others, family, base, path)
        notes.append(f"left out {len(others)} tensors of the model itself, which the base contains")
        others = {}
    homes = {name: _home(name, family) for name in others}
    if unknown := sorted(name for name, home in homes.items() if home is None):
        raise unplaced(unknown, [name for name, home in family.names.items() if home], path.name, DESCRIPTION)
    fields = {name: run.lora.get(old) for name, old in (("r", "lora_rank"), ("lora_alpha", "lora_alpha"))}
    settings = (path if path.is_dir() else path.parent) / run.file_name if run.file_name else None
    found_files = path.rglob("*") if path.is_dir() else [path]
    adapter = as_adapter(
        sorted(file for file in found_files if file.suffix in SUFFIXES and file.is_file()) or [path],
        settings,
        {name: value for name, value in fields.items() if value is not None},
        placed,
        alpha,
        {home: others[name] for name, home in homes.items() if home},
        notes,
    )
    return replace(adapter, path=path if path.is_dir() else path.parent)


def _llama(
    factors: dict[str, ForeignPair], run: RunConfig, sizes: LayerSizes, table: Mapping[str, str | None]
) -> dict[str, ForeignPair]:
    """Splits fused queries, keys and values, or gate and up; each part keeps the A of the whole."""
    apart: dict[str, ForeignPair] = {}
    for module, own in factors.items():
        name = f"{module}.weight"
        if not any(sign.fullmatch(name) for sign, _ in FUSED):
            apart[module] = own
            continue
        try:
            layout_of(run, name)
        except InputRefused as error:
            raise InputRefused(
                str(error),
                hint="put the run's YAML next to the file, and in its `model_config` the line `qkv_layout: plain` if "
                "MindFormers up to 1.4 wrote it, `qkv_layout: interleaved` since 1.5",
            ) from error
        parts = unfuse(run, {name: own.b}, sizes)
        apart |= {part.removesuffix(".weight"): replace(own, b=rows) for part, rows in parts.items()}
    return renamed(apart, table, run.source, DESCRIPTION)


def _glm(
    factors: dict[str, ForeignPair], run: RunConfig, sizes: LayerSizes, table: Mapping[str, str | None]
) -> dict[str, ForeignPair]:
    apart: dict[str, ForeignPair] = {}
    for module, own in factors.items():
        root = module.removesuffix(".self_attention.query_key_value")
        parts = split_qkv(own.b, sizes, "plain") if root != module else []
        apart |= {f"{root}.self_attention.w{one}": replace(own, b=b) for one, b in zip("qkv", parts, strict=False)}
        apart |= {} if parts else {module: own}
    placed = renamed(apart, table, run.source, DESCRIPTION)
    if run.flag("use_rearrange_rope"):
        order = [row % 2 * (sizes.dim // 2) + row // 2 for row in range(sizes.dim)]
        placed = reordered(placed, re.compile(r"\.[qk]_proj$"), order)
    sides = ("mlp.gate_proj", "mlp.up_proj")
    return join_modules(placed, sides, "mlp.gate_up_proj", (sizes.inner, sizes.inner), run.source)


def _bloom(
    factors: dict[str, ForeignPair], run: RunConfig, sizes: LayerSizes, table: Mapping[str, str | None]
) -> dict[str, ForeignPair]:
    plain = {module.removeprefix("transformer."): own for module, own in factors.items()}
    return join_modules(
        renamed(plain, table, run.source, DESCRIPTION),
        DENSE,
        "query_key_value",
        sizes.attention,
        run.source,
        lambda parts: interleave_rows(parts, [sizes.dim] * 3),
    )


Place = Callable[[dict[str, ForeignPair], RunConfig, LayerSizes, Mapping[str, str | None]], dict[str, ForeignPair]]
# Renames the factors of a family to the base's modules, and reorders their rows
PLACES: dict[Any, Place] = {
    **dict.fromkeys((families.build_llama, families.build_qwen, families.build_core), _llama),
    families.build_gpt2: lambda factors, run, sizes, table: join_modules(
        renamed(factors, table, run.source, DESCRIPTION), DENSE, "c_attn", sizes.attention, run.source
    ),
    families.build_bloom: _bloom,
    families.build_glm: _glm,
}


def _home(name: str, family: MindFormersFamily) -> str | None:
    """Name of the base's tensor that equals `name` row by row; None if it is fused or transposed there."""
    if PLACES.get(family.build) is not _llama or any(sign.fullmatch(name) for sign, _ in FUSED):
        return None
    row, number = find_row(name, family.names)
    target = family.names[row] if row else None
    return target and target.format(number)


def _require_base(others: Mapping[str, LazyTensor], family: MindFormersFamily, base: Checkpoint, path: Path) -> None:
    """Raises InputRefused if the first block of one of the file's weights differs from the base's."""
    for name, tensor in others.items():
        there = base.get(_home(name, family) or "")
        if there is not None and not _similar(tensor, there):
            raise InputRefused(
                f"`{path.name}` holds a whole model with its LoRA, and its `{name}` differs from the base's",
                hint=f"convert it as it is: `llmconv to-hf {word(path)} --config run.yaml -o OUT` merges its LoRA",
            )


def _similar(one: LazyTensor, other: LazyTensor) -> bool:
    """Whether two tensors begin with the same values, up to rounding if their dtypes differ."""
    if one.shape != other.shape:
        return False
    block = next(islice(one.blocks(), 1), (0, 0))
    mine, theirs = (tensor.rows(*block).astype(np.float64) for tensor in (one, other))
    tolerance = 0.0 if one.dtype == other.dtype else HALF_PRECISION
    return bool(np.allclose(mine, theirs, rtol=tolerance, atol=tolerance * 1e-3))


ADAPTER = AdapterFormat(
    "MindFormers (MindPET pairs in a MindSpore `.ckpt` or safetensors)",
    lambda path: not ((path if path.is_dir() else path.parent) / CONFIG).is_file() and is_mindspore(path),
    open_mindformers_adapter,
)
