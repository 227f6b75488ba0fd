"""LLaMA2-Accessory's plugins: what the language model of each is, and what transformers has no place for."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from llmconv.checkpoint import read_json
from llmconv.convert.algebra.operations import listing
from llmconv.errors import UnsupportedInput
from llmconv.tensors import LazyTensor

LLAMAS = (
    *("llama", "llama_peft", "llama_adapter", "llama_qformerv2", "llama_qformerv2_peft", "llama_ens_peft"),
    *("llama_ens", "llama_ens_light", "llama_ens5", "llama_ens5_light", "llama_ens5p2", "llama_ens10"),
)
MIXTRALS = ("mixtral", "mixtral_peft", "mixtral_sparse", "mixtral_sparse_ens", "mixtral_sparse_ens5")
FAMILIES = {
    **dict.fromkeys(LLAMAS, "llama"),
    **dict.fromkeys(MIXTRALS, "mixtral"),
    "internlm": "internlm",
    "falcon": "falcon",
}
"""Upstream's plugins (`accessory/model/LLM/`), each by what its language model is."""

PICTURES = re.compile(
    r"(?:clip|clip_proj|clip_proj_norm|openclip_convnext_xxl|dinov2_vitg14|qformer|qformer_proj"
    r"|visual_\w+|start_img|end_img)(?:\.|$)"
)
PREFIX = re.compile(r"prefix(?:_gate|_new_gate)?$")
"""What `llama_adapter` learns; unlike the parts for pictures, it takes part in every answer."""


def plugin_family(folder: Path, names: Iterable[str]) -> str:
    """`llama`, `mixtral`, `internlm` or `falcon`, by `meta.json`; where there is none, by the names of the tensors.

    Raises:
        UnsupportedInput: a plugin that upstream does not have.
    """
    if not (folder / "meta.json").is_file():
        return _family_of(set(names))
    plugin = read_json(folder / "meta.json").get("llama_type")
    if not isinstance(plugin, str) or plugin not in FAMILIES:
        raise UnsupportedInput(
            f"`{folder.name}` was trained with the plugin `{plugin}`, which upstream does not have",
            hint="if its language model is one of upstream's, name that one as `llama_type` in `meta.json`",
        )
    return FAMILIES[plugin]


def _family_of(names: set[str]) -> str:
    """Before November 2023 there was no `meta.json`."""
    marks = {"internlm": ".mixer.", "falcon": ".self_attention.", "mixtral": r".feed_forward.gate."}
    return next((family for family, mark in marks.items() if any(mark in name for name in names)), "llama")


def leave_out(whole: dict[str, LazyTensor], family: str, source: str, *, drop: bool) -> list[str]:
    """Removes from `whole` what no language model of transformers holds; returns warnings that list it.

    Args:
        whole: joined tensors under Accessory's names.
        family: from `plugin_family`.
        source: folder name for error messages.
        drop: whether the user wants that.

    Raises:
        UnsupportedInput: there is something, and `drop` is not given.
    """
    pictures = [name for name in whole if PICTURES.match(name)]
    trained = [name for name in whole if PREFIX.match(name)]
    if family == "mixtral":
        biases = {name: whole.pop(name) for name in list(whole) if re.fullmatch(r"layers\..*\.bias", name)}
        trained += [name for name, bias in biases.items() if not _is_zero(bias)]
    lost = [*pictures, *trained]
    if lost and not drop:
        effect = ", which then answers differently" if trained else ""
        raise UnsupportedInput(
            f"`{source}` has {len(lost)} tensors that no language model of transformers holds: {kinds(lost)}",
            hint=f"`--drop` converts the language model without them{effect}",
        )
    for name in lost:
        whole.pop(name, None)
    warnings = []
    if pictures:
        warnings.append(
            f"dropped {len(pictures)} tensors for pictures: {kinds(pictures)}; text alone needs none of them"
        )
    if trained:
        warnings.append(f"dropped {len(trained)} trained tensors: {kinds(trained)}; the model answers differently")
    return warnings


def kinds(names: Iterable[str]) -> str:
    """Names without numbers, and of foreign models the first part only, so that hundreds stay readable."""
    shown = (
        re.sub(r"\.\d+(?=\.)", "", name) if name.startswith("layers.") else name.partition(".")[0] for name in names
    )
    return listing(list(dict.fromkeys(shown)))


def _is_zero(tensor: LazyTensor) -> bool:
    return not any(tensor.rows(*block).any() for block in tensor.blocks())
