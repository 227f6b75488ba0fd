"""LitGPT's LoRA: `lit_model.pth.lora` next to `hyperparameters.yaml` and `model_config.yaml`.

Layout (Lightning-AI/litgpt `lora.py`): `<module>.lora_A` [r, in], `.lora_B` [out, r], scale lora_alpha/lora_r; in the
fused `attn.qkv` (`attn.attn` until the end of 2024) A stacks one matrix for each trained part (queries, keys, values),
and B stacks their rows, each part in its own order.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmconv.checkpoint import Checkpoint
from llmconv.convert.adapters.adapter import Adapter
from llmconv.convert.adapters.other_tools import (
    AdapterFormat,
    ForeignPair,
    as_adapter,
    join_modules,
    pair_up,
    renamed,
    unplaced,
)
from llmconv.convert.algebra.operations import concat, interleave_rows, slice_rows
from llmconv.convert.formats.litgpt.config import SAME_FUNCTION, LitConfig, family_of, read_settings
from llmconv.convert.formats.litgpt.format import FUSED, group_counts, table_of, unwrapped
from llmconv.convert.models.config_file import read_config_file
from llmconv.convert.state_dicts.files import require_state
from llmconv.errors import MalformedInput, UnsupportedInput
from llmconv.tensors import LazyTensor

FILE, HYPERPARAMETERS = "lit_model.pth.lora", "hyperparameters.yaml"
FACTOR = re.compile(r"(?P<module>.+)\.(?P<part>lora_[AB])")
QKV = re.compile(r"(?P<root>.+\.attn)\.(?:qkv|attn)\.(?P<part>lora_[AB])")
PARTS = {"q": "lora_query", "k": "lora_key", "v": "lora_value"}
TRAINED = {"lora_query": True, "lora_key": False, "lora_value": True}
"""The parts of the fused matrix that `litgpt finetune lora` trains by default."""


def is_litgpt_adapter(path: Path) -> bool:
    """Whether `path` is a `lit_model.pth.lora`, or the folder of one."""
    return (path / FILE).is_file() if path.is_dir() else path.name == FILE and path.is_file()


def open_litgpt_adapter(path: Path, base: Checkpoint, alpha: float | None = None) -> Adapter:
    """Opens a LitGPT LoRA, the file or its folder; `alpha` is for one without `hyperparameters.yaml`.

    Raises InputRefused for a missing file, MalformedInput for another base, UnsupportedInput for another family.
    """
    file = path / FILE if path.is_dir() else path
    lit, source = read_settings(file.parent, file.name), file.parent.name
    family, kind = family_of(lit, source), str(base.config.get("model_type"))
    if kind != family and kind not in SAME_FUNCTION.get(family, ()):
        raise UnsupportedInput(
            f"`{source}` was trained on a {family}, the base is a {kind[:40]}",
            hint="give the base that the adapter was trained on",
        )
    if lit.n_expert > len(base):
        raise MalformedInput(
            f"`{source}` declares {lit.n_expert} experts, more than the base has tensors",
            hint="`model_config.yaml` belongs to another model; copy the adapter's folder again",
        )
    settings = file.parent / HYPERPARAMETERS
    hyperparameters = read_config_file(settings) if settings.is_file() else {}
    tensors = {unwrapped(name): tensor for name, tensor in require_state(file).tensors().items()}
    table = table_of(lit, kind)
    if left := sorted(name for name in tensors if not FACTOR.fullmatch(name)):
        raise unplaced(left, [f"{name.removesuffix('.weight')}.lora_A" for name in table], source, "LitGPT's LoRA")
    factors = _placed(_split_fused(tensors, hyperparameters, lit, source), lit, kind, base, source)
    fields = {
        name: hyperparameters[old]
        for name, old in (("r", "lora_r"), ("lora_alpha", "lora_alpha"))
        if old in hyperparameters
    }
    return as_adapter([file], settings if settings.is_file() else None, fields, factors, alpha)


def _split_fused(
    tensors: Mapping[str, LazyTensor], hyperparameters: Mapping[str, Any], lit: LitConfig, source: str
) -> dict[str, LazyTensor]:
    """Splits the factors of fused matrices into `attn.q`, `attn.k` and `attn.v`; the others stay."""
    rows = [lit.n_head * lit.head_size, *[lit.n_query_groups * lit.head_size] * 2]
    trained = [
        (one, size) for (one, name), size in zip(PARTS.items(), rows, strict=True) if _is_trained(hyperparameters, name)
    ]
    apart: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        if not (match := QKV.fullmatch(name)):
            apart[name] = tensor
            continue
        sizes = [size for _, size in trained]
        if match["part"] == "lora_A":
            sizes = [tensor.num_rows // max(1, len(trained))] * len(trained)
        if not tensor.shape or sum(sizes) != tensor.num_rows or not trained:
            raise MalformedInput(
                f"`{name}` of `{source}` has {tensor.num_rows} rows, which do not match "
                f"{', '.join(PARTS[one] for one, _ in trained) or 'nothing'}",
                hint=f"copy `{HYPERPARAMETERS}` of the run next to it; it lists the trained parts of the fused matrix",
            )
        for (one, _), part in zip(trained, _split(tensor, sizes), strict=True):
            apart[f"{match['root']}.{one}.{match['part']}"] = part
    return apart


def _is_trained(hyperparameters: Mapping[str, Any], name: str) -> bool:
    return bool(hyperparameters.get(name, TRAINED[name]))


def _split(tensor: LazyTensor, sizes: Sequence[int]) -> list[LazyTensor]:
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    return [slice_rows(tensor, start, start + size) for start, size in zip(starts, sizes, strict=True)]


def _placed(
    tensors: Mapping[str, LazyTensor], lit: LitConfig, kind: str, base: Checkpoint, source: str
) -> dict[str, ForeignPair]:
    """The factors by the base's modules, joined where the base fuses several modules."""
    factors = pair_up(tensors, FACTOR, source)
    attention = [lit.n_head * lit.head_size, *[lit.n_query_groups * lit.head_size] * 2]
    counts = group_counts(lit)
    if kind in (*FUSED, "phi3"):
        factors = join_modules(
            factors,
            ("attn.q", "attn.k", "attn.v"),
            "attn.qkv",
            attention,
            source,
            lambda parts: interleave_rows(parts, counts) if kind in FUSED else concat(parts, 0),
        )
    if kind == "phi3":
        sides = (lit.intermediate_size, lit.intermediate_size)
        factors = join_modules(factors, ("mlp.fc_1", "mlp.fc_2"), "mlp.fc", sides, source)
    table = {name.removesuffix(".weight"): str(to).removesuffix(".weight") for name, to in table_of(lit, kind).items()}
    placed = renamed(factors, table, source, "LitGPT's LoRA")
    return {module: _without_padding(own, base.get(f"{module}.weight"), lit) for module, own in placed.items()}


def _without_padding(own: ForeignPair, weight: LazyTensor | None, lit: LitConfig) -> ForeignPair:
    """Removes the rows of the head with which LitGPT pads the vocabulary."""
    if weight is None or own.b.num_rows != lit.padded_vocab_size or weight.num_rows >= own.b.num_rows:
        return own
    return own.with_rows(lambda rows: slice_rows(rows, 0, weight.num_rows))


ADAPTER = AdapterFormat(
    title="LitGPT (`lit_model.pth.lora` next to `hyperparameters.yaml`)",
    detect=is_litgpt_adapter,
    open=open_litgpt_adapter,
)
