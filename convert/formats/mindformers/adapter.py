"""MindFormers' LoRA (MindPET): pairs in a MindSpore `.ckpt` or safetensors, alone or next to the weights they change.

Layout (mindpet `delta/lora.py`, `LoRADense`): `<cell>.mindpet_delta_lora_a` (r×in) and `_b` (out×r), in other versions
`tk_delta_lora_a` or `lora_a`; the update is B·A·lora_alpha/r, and lora_alpha is in the run's YAML (`pet_config`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np

from llmconv.checkpoint import Checkpoint
from llmconv.convert.adapters.adapter import Adapter
from llmconv.convert.adapters.other_tools import (
    AdapterFormat,
    ForeignPair,
    LayerSizes,
    as_adapter,
    join_modules,
    pair_up,
    renamed,
    sizes_of,
    unplaced,
)
from llmconv.convert.adapters.peft_file import CONFIG
from llmconv.convert.algebra import fitting, interleave_rows, permute_rows
from llmconv.convert.formats.mindformers.config import (
    BLOOM,
    CORE,
    DENSE,
    FUSED,
    GLM,
    GPT2,
    LLAMA,
    LORA,
    QWEN,
    RunConfig,
    layout_of,
    read_run_config,
    split_qkv,
    unfuse,
)
from llmconv.convert.formats.mindformers.format import is_mindspore, open_parameters
from llmconv.errors import InputRefused, UnsupportedInput, listing
from llmconv.tensors import LazyTensor

FACTOR = re.compile(r"(?P<module>.+)\.(?:mindpet_delta_|tk_delta_)?(?P<part>lora_[ab])(?:\.weight)?", re.IGNORECASE)
DESCRIPTION = "a LoRA of MindFormers"
FUSED_GLM = ".self_attention.query_key_value"
HALF_PRECISION = 2.0**-7  # largest relative difference between two roundings of a number to half precision


@dataclass(frozen=True)
class LoraFamily:
    """How the LoRA pairs of one model family are converted."""

    sign: re.Pattern[str]  # matches the beginning of names that only this family has
    names: Mapping[str, str | None]
    # renames the factors to the base's modules, and reorders their rows
    place: Callable[[dict[str, ForeignPair], RunConfig, LayerSizes, Mapping[str, str]], dict[str, ForeignPair]]


def is_mindformers_adapter(path: Path) -> bool:
    """Whether `path` is a MindSpore file or folder, with or without LoRA pairs: that is checked when it is opened."""
    folder = path if path.is_dir() else path.parent
    return not (folder / CONFIG).is_file() and is_mindspore(path)


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
            hint=f"convert a whole model with `llmconv to-hf {path.name} --config run.yaml -o OUT`",
        )
    others = {name: tensor for name, tensor in found.tensors.items() if name not in pairs}
    family, factors = _family(pairs, path.name), pair_up(pairs, FACTOR, path.name)
    placed = _placed(factors, family, run, base, path.name)
    notes = list(found.warnings)
    if any(f"{module}.weight" in others for module in factors):
        _require_base(others, family, base, path.name)
        notes.append(f"left out {len(others)} tensors of the model itself, which the base contains")
        others = {}
    fields = {name: run.lora.get(old) for name, old in (("r", "lora_rank"), ("lora_alpha", "lora_alpha"))}
    settings = (path if path.is_dir() else path.parent) / run.file_name if run.file_name else None
    adapter = as_adapter(
        _files(path),
        settings,
        {name: value for name, value in fields.items() if value is not None},
        placed,
        alpha,
        _whole(others, family, path.name),
        notes,
    )
    return replace(adapter, path=path if path.is_dir() else path.parent)


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    return sorted(file for file in path.rglob("*") if file.suffix in (".ckpt", ".safetensors") and file.is_file())


def _family(tensors: Mapping[str, LazyTensor], source: str) -> LoraFamily:
    for family in FAMILIES:
        if any(family.sign.search(name) for name in tensors):
            return family
    raise UnsupportedInput(
        f"`{source}` holds LoRA pairs of an unknown model: {listing(sorted(tensors))}",
        hint="supported are llama, qwen, internlm, baichuan, gpt2, bloom and chatglm2/3 in MindFormers' names",
    )


def _placed(
    factors: dict[str, ForeignPair], family: LoraFamily, run: RunConfig, base: Checkpoint, source: str
) -> dict[str, ForeignPair]:
    table = {name.removesuffix(".weight"): str(to).removesuffix(".weight") for name, to in family.names.items()}
    with fitting(f"the rows of `{source}` do not match the base's heads", "the adapter was trained on another model"):
        return family.place(factors, run, sizes_of(base), table)


def _llama(
    factors: dict[str, ForeignPair], run: RunConfig, sizes: LayerSizes, table: Mapping[str, str]
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
    factors: dict[str, ForeignPair], run: RunConfig, sizes: LayerSizes, table: Mapping[str, str]
) -> dict[str, ForeignPair]:
    apart: dict[str, ForeignPair] = {}
    for module, own in factors.items():
        root = module.removesuffix(FUSED_GLM)
        parts = split_qkv(own.b, sizes, "plain") if root != module else []
        apart |= {
            f"{root}.self_attention.w{one}": replace(own, b=rows) for one, rows in zip("qkv", parts, strict=False)
        }
        apart |= {} if parts else {module: own}
    placed = renamed(apart, table, run.source, DESCRIPTION)
    if run.flag("use_rearrange_rope"):
        order = [row % 2 * (sizes.dim // 2) + row // 2 for row in range(sizes.dim)]
        placed = {
            module: own.with_rows(lambda rows: permute_rows(rows, order)) if re.search(r"\.[qk]_proj$", module) else own
            for module, own in placed.items()
        }
    sides = ("mlp.gate_proj", "mlp.up_proj")
    return join_modules(placed, sides, "mlp.gate_up_proj", (sizes.inner, sizes.inner), run.source)


def _gpt2(
    factors: dict[str, ForeignPair], run: RunConfig, sizes: LayerSizes, table: Mapping[str, str]
) -> dict[str, ForeignPair]:
    placed = renamed(factors, table, run.source, DESCRIPTION)
    return join_modules(placed, DENSE, "c_attn", sizes.attention, run.source)


def _bloom(
    factors: dict[str, ForeignPair], run: RunConfig, sizes: LayerSizes, table: Mapping[str, str]
) -> dict[str, ForeignPair]:
    plain = {module.removeprefix("transformer."): own for module, own in factors.items()}
    counts = [sizes.dim] * 3
    return join_modules(
        renamed(plain, table, run.source, DESCRIPTION),
        DENSE,
        "query_key_value",
        sizes.attention,
        run.source,
        lambda parts: interleave_rows(parts, counts),
    )


FAMILIES = (
    LoraFamily(re.compile(r"^model\.(?:layers\.\d+|tok_embeddings)\."), LLAMA, _llama),
    LoraFamily(re.compile(r"^transformer\.(?:layers\.\d+|wte)\."), QWEN, _llama),
    LoraFamily(re.compile(r"^decoder\.layers\."), CORE, _llama),
    LoraFamily(re.compile(r"^backbone\."), GPT2, _gpt2),
    LoraFamily(re.compile(r"^(?:transformer\.)?blocks\.\d+\."), BLOOM, _bloom),
    LoraFamily(re.compile(r"^transformer\.encoder\."), GLM, _glm),
)


def _whole(others: Mapping[str, LazyTensor], family: LoraFamily, source: str) -> dict[str, LazyTensor]:
    """Trained tensors that replace the base's, by Hugging Face name."""
    homes = {name: _home(name, family) for name in others}
    if unknown := sorted(name for name, home in homes.items() if home is None):
        raise unplaced(unknown, [name for name, home in family.names.items() if home], source, DESCRIPTION)
    return {home: others[name] for name, home in homes.items() if home is not None}


def _home(name: str, family: LoraFamily) -> str | None:
    """Name of the base's tensor that equals `name` row by row; None if it is fused or transposed there."""
    if family.place is not _llama or any(sign.fullmatch(name) for sign, _ in FUSED):
        return None
    number = re.search(r"(?<=\.)\d{1,9}(?=\.)", name)
    target = family.names.get(name.replace(f".{number[0]}.", ".{}.", 1) if number else name)
    return target.format(number[0]) if target and number else target


def _require_base(others: Mapping[str, LazyTensor], family: LoraFamily, base: Checkpoint, source: str) -> None:
    """Raises InputRefused if the first block of one of the file's weights differs from the base's."""
    for name, tensor in others.items():
        there = base.get(_home(name, family) or "")
        if there is not None and not _similar(tensor, there):
            raise InputRefused(
                f"`{source}` holds a whole model with its LoRA, and its `{name}` differs from the base's",
                hint=f"convert it as it is: `llmconv to-hf {source} --config run.yaml -o OUT` merges its LoRA",
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
    is_mindformers_adapter,
    open_mindformers_adapter,
)
