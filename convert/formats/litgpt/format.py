"""LitGPT: `lit_model.pth` next to `model_config.yaml`, with the tokenizer and often the `config.json` of the origin.

Layout (Lightning-AI/litgpt `utils.py`, `save_config`, `copy_config_files`): a state dict, flat or under `model`.
Without a `config.json` one is made from the YAML; otherwise the two must agree.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmconv.checkpoint import Checkpoint
from llmconv.convert.formats import Format, has_sign_of
from llmconv.convert.formats.litgpt.config import (
    SAME_FUNCTION,
    LitConfig,
    family_of,
    read_settings,
    reconcile,
    to_config,
)
from llmconv.convert.formats.litgpt.convert_tensors import to_hugging_face
from llmconv.convert.models.completeness import as_loaded
from llmconv.convert.models.config_file import causal_lm_config
from llmconv.convert.state_dicts.checkpoint import config_folder, contents_around, side_files_of, stored_config
from llmconv.convert.state_dicts.files import Sign, StateFile, open_state
from llmconv.errors import MalformedInput, UnsupportedInput, listing

FILE = "lit_model.pth"
WRAPPERS = ("_forward_module.", "_orig_mod.", "module.")
ADAPTERS = ("lora_", "adapter_", "gating_factor")
HEADS = ("lm_head.weight", "embed_out.weight")
OWN_NAMES = re.compile(
    r"^(?:_orig_mod\.|module\.|_forward_module\.)*transformer\.h\.\d+\.(?:attn\.(?:attn|qkv)|norm_[12])\."
)
"""Names that no other system has (its `model.py`)."""


def _detect(path: Path) -> bool:
    return has_sign_of(FORMAT.name, _file(path))


def _file(path: Path) -> Path:
    return path / FILE if path.is_dir() else path


def _read(path: Path) -> StateFile:
    found = open_state(_file(path))
    if found is None:
        raise MalformedInput(f"`{path.name}` contains no state dict", hint="it should hold tensors by name")
    return found


def _open(path: Path, config: Mapping[str, Any], tokenizer: Path | None) -> Checkpoint:
    found, warnings = _read(path), list[str]()
    names = [name for name in found.state if any(part in name for part in ADAPTERS)]
    if names:
        raise UnsupportedInput(
            f"`{path.name}` holds adapters that are not merged: {listing(names)}",
            hint="LoRA: merge it into the converted base, `llmconv merge-lora BASE lit_model.pth.lora -o OUT`; the "
            "other adapters have no equivalent in transformers",
        )
    lit = read_settings(config_folder(path), path.name)
    stored = stored_config(path)
    family = _family(lit, stored, path.name)
    computed = to_config(lit, family, path.name)
    settings = causal_lm_config(reconcile(stored, computed, path.name), config, path.name, warnings)
    plain = {_unwrapped(name): tensor for name, tensor in found.tensors().items()}
    tensors = to_hugging_face(plain, lit, family, path.name)
    settings["tie_word_embeddings"] = None  # LitGPT always keeps two matrices: their values decide
    settings = as_loaded(tensors, settings)
    side_files = side_files_of(path, tokenizer)
    if not set(side_files) - {"generation_config.json"}:
        warnings.append(f"`{path.name}` has no tokenizer next to it; give one with `--tokenizer` if you need it")
    return Checkpoint(
        path, FORMAT.name, tensors, settings, side_files, tuple(warnings), _version(found), 1, contents_around(found)
    )


def _family(lit: LitConfig, stored: Mapping[str, Any], source: str) -> str:
    """The family of the YAML, or that of the `config.json` if it computes the same."""
    family, declared = family_of(lit, source), stored.get("model_type")
    return str(declared) if declared in SAME_FUNCTION.get(family, ()) else family


def _unwrapped(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.removeprefix(wrapper)
    return name


def _version(found: StateFile) -> str:
    return "litgpt before 2025" if any(".attn.attn." in name for name in found.state) else "litgpt"


FORMAT = Format(
    name="litgpt",
    title="LitGPT: `lit_model.pth` next to `model_config.yaml`, or the folder of both",
    detect=_detect,
    sign=Sign(names=OWN_NAMES),
    open=_open,
    covers="Llama 2 and 3, Code Llama, TinyLlama, Mistral, Mixtral, Phi 1.5 to 4, Qwen 2, 2.5 and 3, Gemma 1 and 2, "
    "Pythia, Falcon; fused matrices of both ages",
    peek=lambda path: _read(path).tensors(),
)
