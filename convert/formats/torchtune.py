"""torchtune's own checkpoints, next to the `config.json` that its recipes copy, and its adapters in its own names.

Layout (pytorch/torchtune `models/convert_weights.py`, `models/{qwen2,phi3}/_convert_weights.py`): Llama, Mistral
and Gemma rotate neighbors as Meta does, so rows of queries and keys are reordered; Qwen 2 and Phi-3 rotate halves.
Adapters (`modules/peft/{lora,dora}.py`): `<module>.lora_a.weight` [r, in], `.lora_b.weight` [out, r], DoRA's
`.magnitude`, with rows in the order of torchtune's weights, with or without `adapter_config.json`. Recipes also write
the adapter in PEFT's names, always with rows in transformers' order of Llama, even if the model's differs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmconv.checkpoint import Checkpoint, read_json
from llmconv.convert.adapters import other_tools
from llmconv.convert.adapters.adapter import Adapter
from llmconv.convert.adapters.peft_file import WEIGHTS, read_tensors
from llmconv.convert.algebra import fitting, fuse, renamed, reordered, rope_order
from llmconv.convert.assembly import contents_around, second_models, side_files_of, stored_config
from llmconv.convert.formats import AdapterFormat, Format, has_sign_of
from llmconv.convert.models.completeness import WRAPPERS, as_loaded
from llmconv.convert.models.config_file import causal_lm_config
from llmconv.convert.state_dicts.files import Sign, require_state
from llmconv.errors import InputRefused, LlmconvError, UnsupportedInput, listing, word
from llmconv.not_a_model_folder import SUFFIXES_OF_TORCH

NAMES: dict[str, str | None] = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "layers.{}.attn.q_proj.weight": "model.layers.{}.self_attn.q_proj.weight",
    "layers.{}.attn.k_proj.weight": "model.layers.{}.self_attn.k_proj.weight",
    "layers.{}.attn.v_proj.weight": "model.layers.{}.self_attn.v_proj.weight",
    "layers.{}.attn.output_proj.weight": "model.layers.{}.self_attn.o_proj.weight",
    "layers.{}.mlp.w1.weight": "model.layers.{}.mlp.gate_proj.weight",
    "layers.{}.mlp.w3.weight": "model.layers.{}.mlp.up_proj.weight",
    "layers.{}.mlp.w2.weight": "model.layers.{}.mlp.down_proj.weight",
    "layers.{}.sa_norm.scale": "model.layers.{}.input_layernorm.weight",
    "layers.{}.mlp_norm.scale": "model.layers.{}.post_attention_layernorm.weight",
    "norm.scale": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
BIASES: dict[str, str | None] = {
    f"layers.{{}}.attn.{one}_proj.bias": f"model.layers.{{}}.self_attn.{one}_proj.bias" for one in "qkv"
}
HEAD_NORMS: dict[str, str | None] = {
    f"layers.{{}}.attn.{one}_norm.scale": f"model.layers.{{}}.self_attn.{one}_norm.weight" for one in "qk"
}
ROTATED = re.compile(r"\.self_attn\.[qk]_proj\.weight$")


@dataclass(frozen=True)
class TorchtuneFamily:
    """How a model type differs from the common names."""

    names: Mapping[str, str | None] = field(default_factory=dict)  # in addition to `NAMES`
    rotates_neighbors: bool = True  # rotary positions rotate neighbors, so that rows of queries and keys are reordered
    # Hugging Face's name of a fused matrix to the names of its parts
    fused: Mapping[str, Sequence[str]] = field(default_factory=dict)


FAMILIES = {
    **dict.fromkeys(("llama", "mistral", "gemma"), TorchtuneFamily()),
    "qwen2": TorchtuneFamily(BIASES, rotates_neighbors=False),
    "qwen3": TorchtuneFamily(HEAD_NORMS, rotates_neighbors=False),
    "phi3": TorchtuneFamily(
        rotates_neighbors=False,
        fused={
            "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
        },
    ),
}
OWN_NAMES = re.compile(r"^(?:_orig_mod\.|module\.)*layers\.\d+\.(?:attn\.output_proj|sa_norm|mlp_norm)\.")
"""Names that no other system has (its `modules/transformer.py`)."""


def _files(path: Path) -> list[Path]:
    candidates = [path]
    if path.is_dir():
        candidates = [file for file in sorted(path.iterdir()) if file.suffix in SUFFIXES_OF_TORCH]
    return [file for file in candidates if has_sign_of(FORMAT.name, file)]


def _open(path: Path, config: Mapping[str, Any], tokenizer: Path | None) -> Checkpoint:
    found = require_state(_files(path)[0])
    warnings = second_models(found)
    if names := [name for name in found.state if "lora_" in name or name.endswith(".magnitude")]:
        raise UnsupportedInput(
            f"`{path.name}` holds LoRA matrices that are not merged: {listing(names)}",
            hint="give the merged weights that the recipe saves next to the adapter, or merge it into the Hugging Face "
            f"base: `llmconv merge-lora BASE {word(path)} -o OUT`",
        )
    settings = causal_lm_config(stored_config(found.path), config, path.name, warnings)
    kind = str(settings["model_type"])
    if kind == "gemma2":
        raise UnsupportedInput(
            f"`{path.name}` is a Gemma 2, in which torchtune exchanges two norms and caps the hidden states instead of "
            "the logits; no model of transformers does",
            hint="transformers has no equivalent model; train it with another program",
        )
    if kind not in FAMILIES:
        raise UnsupportedInput(
            f"`{path.name}` is a {kind} in torchtune's names, whose order of rows is unknown",
            hint=f"supported are {', '.join(FAMILIES)}; save it with torchtune's FullModelHFCheckpointer",
        )
    family = FAMILIES[kind]
    stored = {WRAPPERS.sub("", name): tensor for name, tensor in found.tensors().items()}
    tensors = renamed(stored, NAMES | dict(family.names), path.name)
    if family.rotates_neighbors:
        order = rope_order(other_tools.sizes_of(settings, path.name).dim)
        with fitting(f"the heads of `{path.name}` do not match its configuration"):
            tensors = reordered(tensors, ROTATED, order)
    for whole, parts in family.fused.items():
        with fitting(f"the parts of `{whole}` in `{path.name}` cannot be joined", "it is damaged or partial"):
            counts = other_tools.sizes_of(settings, path.name).attention if len(parts) > 2 else ()
            tensors = fuse(tensors, parts, whole, counts=counts)
    settings = as_loaded(tensors, settings)
    side_files = side_files_of(found.path, tokenizer)
    return Checkpoint(path, FORMAT.name, tensors, settings, side_files, tuple(warnings), dropped=contents_around(found))


FORMAT = Format(
    name="torchtune",
    title="torchtune's own names: a file, or the folder of an epoch",
    detect=lambda path: len(_files(path)) == 1,
    sign=Sign(names=OWN_NAMES),
    open=_open,
    covers="Llama 2 to 3.3, Code Llama, Mistral, Qwen 2, 2.5 and 3, Gemma, Phi-3 and 4; no Gemma 2, which it computes "
    "differently",
    peek=lambda path: require_state(_files(path)[0]).tensors(),
)


CONFIG = "adapter_config.json"
ADAPTER_FILE = re.compile(r"adapter_(?:model|\d{1,9})\.(?:pt|bin|pth|ckpt|safetensors)")
SAME_IN_TORCHTUNE_NAMES = "adapter_model.pt"  # the same adapter as `adapter_model.safetensors`, in torchtune's names
OWN_FILE = re.compile(r"adapter_(?:model|\d{1,9})\.pt")  # file names that only torchtune uses
FACTOR = re.compile(r"(?P<module>.+)\.(?P<part>lora_a|lora_b|magnitude)(?:\.weight)?")
SIGN = re.compile(r"(?:^|\.)layers\.\d+\.(?:attn|mlp)\.\w+\.(?:lora_[ab]\.weight|magnitude)$")
QUERY_OR_KEY = re.compile(r"\.self_attn\.[qk]_proj$")


def _adapter_files(path: Path) -> list[Path]:
    candidates = sorted(path.iterdir()) if path.is_dir() else [path]
    if path.name in WEIGHTS and (own := path.with_name(SAME_IN_TORCHTUNE_NAMES)).is_file() and path.is_file():
        candidates = [own]
    return [file for file in candidates if ADAPTER_FILE.fullmatch(file.name) and file.is_file() and _is_own(file)]


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
    files = _adapter_files(path)
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
    config = read_json(settings) if settings.is_file() else {}
    fields = {name: config[name] for name in ("r", "lora_alpha") if config.get(name) is not None}
    tensors = {WRAPPERS.sub("", name): tensor for name, tensor in read_tensors(file).items()}
    if left := [name for name in tensors if not FACTOR.fullmatch(name)]:
        known = [name.replace(".weight", ".lora_a.weight") for name in NAMES]
        raise other_tools.unplaced(left, known, file.name, "a torchtune adapter")
    placed = other_tools.renamed(
        other_tools.pair_up(tensors, FACTOR, file.name), NAMES, file.name, "a torchtune adapter"
    )
    sizes = other_tools.sizes_of(base.config, base.path.name)
    with fitting(f"the heads of `{file.name}` do not match the base's", "the adapter was trained on another model"):
        if family.rotates_neighbors:
            placed = other_tools.reordered(placed, QUERY_OR_KEY, rope_order(sizes.dim))
    for whole, parts in family.fused.items():
        counts = sizes.attention if len(parts) == 3 else (sizes.inner, sizes.inner)
        placed = other_tools.join_modules(placed, parts, whole, counts, file.name)
    return other_tools.as_adapter([file], settings if settings.is_file() else None, fields, placed, alpha)


ADAPTER = AdapterFormat(
    "torchtune (`adapter_model.pt` or `adapter_N.pt` in its own names)",
    lambda path: bool(_adapter_files(path)),
    open_torchtune_adapter,
)
