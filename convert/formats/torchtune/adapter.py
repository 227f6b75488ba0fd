"""torchtune's adapters in its own names: `adapter_model.pt` or `adapter_N.pt`, with or without `adapter_config.json`.

Layout (torchtune `modules/peft/{lora,dora}.py`, `models/convert_weights.py`): `<module>.lora_a.weight` [r, in],
`.lora_b.weight` [out, r], DoRA's `.magnitude`; rows of queries and keys in the order of torchtune's weights. Recipes
also write the adapter in PEFT's names, always with rows in transformers' order of Llama, even if the model's differs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmconv.checkpoint import Checkpoint, read_json
from llmconv.convert.adapters.adapter import Adapter
from llmconv.convert.adapters.other_tools import (
    AdapterFormat,
    ForeignPair,
    as_adapter,
    join_modules,
    pair_up,
    renamed,
    sizes_of,
    unplaced,
)
from llmconv.convert.adapters.peft_file import WEIGHTS, read_tensors
from llmconv.convert.algebra.operations import permute_rows, rope_order
from llmconv.convert.formats.torchtune.format import FAMILIES, NAMES, TorchtuneFamily
from llmconv.convert.models.completeness import WRAPPERS
from llmconv.errors import InputRefused, LlmconvError, MalformedInput, UnsupportedInput

CONFIG = "adapter_config.json"
FILE = re.compile(r"adapter_(?:model|\d{1,9})\.(?:pt|bin|pth|ckpt|safetensors)")
SAME_IN_TORCHTUNE_NAMES = "adapter_model.pt"  # the same adapter as `adapter_model.safetensors`, in torchtune's names
OWN_FILE = re.compile(r"adapter_(?:model|\d{1,9})\.pt")  # file names that only torchtune uses
FACTOR = re.compile(r"(?P<module>.+)\.(?P<part>lora_a|lora_b|magnitude)(?:\.weight)?")
SIGN = re.compile(r"(?:^|\.)layers\.\d+\.(?:attn|mlp)\.\w+\.(?:lora_[ab]\.weight|magnitude)$")
QUERY_OR_KEY = re.compile(r"\.self_attn\.[qk]_proj$")

MODULES = {name.removesuffix(".weight"): str(target).removesuffix(".weight") for name, target in NAMES.items()}


def is_torchtune_adapter(path: Path) -> bool:
    """Whether `path` is an adapter in torchtune's names, or the folder of an epoch with one."""
    return bool(_files(path))


def _files(path: Path) -> list[Path]:
    candidates = sorted(path.iterdir()) if path.is_dir() else [path]
    if path.name in WEIGHTS and (own := path.with_name(SAME_IN_TORCHTUNE_NAMES)).is_file() and path.is_file():
        candidates = [own]
    return [file for file in candidates if FILE.fullmatch(file.name) and file.is_file() and _is_own(file)]


def _is_own(file: Path) -> bool:
    """Whether its tensors have torchtune's names; an unreadable file is judged by its file name, to get a message."""
    try:
        return any(SIGN.search(name) for name in read_tensors(file))
    except (LlmconvError, OSError):
        return OWN_FILE.fullmatch(file.name) is not None


def open_torchtune_adapter(path: Path, base: Checkpoint, alpha: float | None = None) -> Adapter:
    """Opens an adapter in torchtune's names, the file or the folder of an epoch; old recipes do not store `alpha`.

    Raises InputRefused for several adapters or no alpha, MalformedInput for another base, UnsupportedInput for a family
    whose order of rows is unknown.
    """
    files = _files(path)
    if len(files) > 1:
        raise InputRefused(
            f"`{path.name}` holds {len(files)} adapters: {', '.join(file.name for file in files[:5])}",
            hint=f"give one of them, such as `{files[-1]}`",
        )
    kind = str(base.config.get("model_type"))
    if kind not in FAMILIES:
        raise UnsupportedInput(
            f"the base is a {kind[:40]}, for which the order of rows in torchtune's adapters is unknown",
            hint=f"supported are {', '.join(FAMILIES)}; for others give only the folder that torchtune wrote for PEFT",
        )
    file, family = files[0], FAMILIES[kind]
    settings = file.parent / CONFIG
    fields = _fields(read_json(settings)) if settings.is_file() else {}
    tensors = {WRAPPERS.sub("", name): tensor for name, tensor in read_tensors(file).items()}
    if left := [name for name in tensors if not FACTOR.fullmatch(name)]:
        raise unplaced(left, [f"{module}.lora_a.weight" for module in MODULES], file.name, "a torchtune adapter")
    factors = _placed(pair_up(tensors, FACTOR, file.name), family, base, file.name)
    return as_adapter([file], settings if settings.is_file() else None, fields, factors, alpha)


def _fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields for merging; those about the training run are left out."""
    return {name: config[name] for name in ("r", "lora_alpha") if config.get(name) is not None}


def _placed(
    factors: Mapping[str, ForeignPair], family: TorchtuneFamily, base: Checkpoint, source: str
) -> dict[str, ForeignPair]:
    placed = renamed(factors, MODULES, source, "a torchtune adapter")
    sizes = sizes_of(base)
    try:
        if family.rotates_neighbors:
            placed = {
                module: own.with_rows(lambda rows: permute_rows(rows, rope_order(sizes.dim)))
                if QUERY_OR_KEY.search(module)
                else own
                for module, own in placed.items()
            }
    except ValueError as error:
        raise MalformedInput(
            f"the heads of `{source}` do not match the base's: {error}",
            hint="the adapter was trained on another model",
        ) from error
    for whole, parts in family.fused.items():
        counts = sizes.attention if len(parts) == 3 else (sizes.inner, sizes.inner)
        placed = join_modules(placed, parts, whole, counts, source)
    return placed


ADAPTER = AdapterFormat(
    title="torchtune (`adapter_model.pt` or `adapter_N.pt` in its own names)",
    detect=is_torchtune_adapter,
    open=open_torchtune_adapter,
)
