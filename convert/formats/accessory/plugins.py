"""LLaMA2-Accessory's plugins: the language model of each, and the tensors that transformers cannot hold."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from llmconv.checkpoint import read_json
from llmconv.errors import UnsupportedInput, listing
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
"""Upstream's plugins (`accessory/model/LLM/`) to the family of their language model."""

VISION = re.compile(
    r"(?:clip|clip_proj|clip_proj_norm|openclip_convnext_xxl|dinov2_vitg14|qformer|qformer_proj"
    r"|visual_\w+|start_img|end_img)(?:\.|$)"
)
TRAINED_PREFIX = re.compile(r"prefix(?:_gate|_new_gate)?$")
"""Tensors that `llama_adapter` trains; unlike those for images, they change every answer."""


def plugin_family(folder: Path, names: Iterable[str]) -> str:
    """`llama`, `mixtral`, `internlm` or `falcon`, from `meta.json` or else from the names of the tensors.

    Raises:
        UnsupportedInput: upstream does not have the plugin.
    """
    if not (folder / "meta.json").is_file():
        return _family_of(set(names))
    plugin = read_json(folder / "meta.json").get("llama_type")
    if not isinstance(plugin, str) or plugin not in FAMILIES:
        raise UnsupportedInput(
            f"`{folder.name}` was trained with the unknown plugin `{plugin}`",
            hint="if its language model is one of upstream's, give that one as `llama_type` in `meta.json`",
        )
    return FAMILIES[plugin]


def _family_of(names: set[str]) -> str:
    """The family from tensor names, for runs from before November 2023, which have no `meta.json`."""
    marks = {"internlm": ".mixer.", "falcon": ".self_attention.", "mixtral": r".feed_forward.gate."}
    return next((family for family, mark in marks.items() if any(mark in name for name in names)), "llama")


def leave_out(whole: dict[str, LazyTensor], family: str, source: str, *, drop: bool) -> list[str]:
    """Removes the tensors that no language model of transformers has.

    Args:
        whole: joined tensors in Accessory's names; changed in place.
        family: from `plugin_family`.
        source: name of the checkpoint's folder, for error messages.
        drop: whether the user allows it.

    Returns:
        Warnings that list the removed tensors.

    Raises:
        UnsupportedInput: there are such tensors, and `drop` is False.
    """
    vision = [name for name in whole if VISION.match(name)]
    trained = [name for name in whole if TRAINED_PREFIX.match(name)]
    if family == "mixtral":
        biases = {name: whole.pop(name) for name in list(whole) if re.fullmatch(r"layers\..*\.bias", name)}
        trained += [name for name, bias in biases.items() if not is_zero(bias)]
    lost = [*vision, *trained]
    if lost and not drop:
        effect = ", which then answers differently" if trained else ""
        raise UnsupportedInput(
            f"`{source}` has {len(lost)} tensors that no language model of transformers has: {kinds(lost)}",
            hint=f"`--drop` converts the language model without them{effect}",
        )
    for name in lost:
        whole.pop(name, None)
    warnings = []
    if vision:
        warnings.append(f"dropped {len(vision)} tensors for images: {kinds(vision)}; text alone does not need them")
    if trained:
        warnings.append(f"dropped {len(trained)} trained tensors: {kinds(trained)}; the model answers differently")
    return warnings


def kinds(names: Iterable[str]) -> str:
    """A short list of names: without layer numbers, and only the first part of other models' names."""
    shown = (
        re.sub(r"\.\d+(?=\.)", "", name) if name.startswith("layers.") else name.partition(".")[0] for name in names
    )
    return listing(list(dict.fromkeys(shown)))


def is_zero(tensor: LazyTensor) -> bool:
    """Whether all elements are zero; reads the tensor block by block."""
    return not any(tensor.rows(*block).any() for block in tensor.blocks())
