"""config.json: what is taken out of one before it is written, and what is put in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmconv.checkpoint import read_json
from llmconv.convert.architectures import causal_lm_classes
from llmconv.errors import InputRefused, UnsupportedInput
from llmconv.tensors import LazyTensor

CODE_FIELDS = ("auto_map", "trust_remote_code", "custom_pipelines", "_attn_implementation_internal")
"""Fields that make a loader run code or fetch a repository that the file names."""

TRACE_FIELDS = ("_name_or_path", "_commit_hash", "_attn_implementation_autoset", "_attn_implementation")
"""Traces of the training machine."""


def merged_configs(paths: tuple[Path, ...]) -> dict[str, Any]:
    """The JSON objects of `paths`, later ones over earlier ones.

    Raises:
        InputRefused: a file is not there.
        MalformedInput: a file is not a JSON object.
    """
    merged: dict[str, Any] = {}
    for path in paths:
        file = path / "config.json" if path.is_dir() else path
        if not file.is_file():
            raise InputRefused(f"there is no configuration at `{path}`", hint="give a JSON file, or a folder with one")
        merged |= read_json(file)
    return merged


def without_code(config: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The config without code-execution fields and traces (at any depth), and the names of the former."""
    kept: dict[str, Any] = {}
    dropped: list[str] = []
    for name, value in config.items():
        if name in CODE_FIELDS:
            dropped += [name] if value else []
        elif isinstance(value, Mapping):
            kept[name], inner = without_code(value)
            dropped += [f"{name}.{field}" for field in inner]
        elif name not in TRACE_FIELDS:
            kept[name] = value
    return kept, tuple(dropped)


def with_architecture(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with `architectures` that fit its `model_type`.

    Raises:
        UnsupportedInput: the installed transformers has no causal language model of this type.
    """
    kind, known = str(config.get("model_type")), causal_lm_classes()
    if known and kind not in known:
        raise UnsupportedInput(
            f"model_type `{kind}` is no causal language model that the installed transformers knows",
            hint="models with code of their own cannot be converted yet; give the right type with `--config`",
        )
    return {**config, **({"architectures": [known[kind]]} if known else {})}


def with_dtype(config: Mapping[str, Any], tensors: Mapping[str, LazyTensor]) -> dict[str, Any]:
    """The config with `torch_dtype` (or `dtype`, where it has that) set to what most of the weights are."""
    sizes: Counter[str] = Counter()
    for tensor in tensors.values():
        if tensor.dtype.name.startswith(("float", "bfloat")):
            sizes[tensor.dtype.name] += tensor.nbytes
    field = "dtype" if "dtype" in config and "torch_dtype" not in config else "torch_dtype"
    kept = {name: value for name, value in config.items() if name not in ("dtype", "torch_dtype")}
    return {**kept, **({field: sizes.most_common(1)[0][0]} if sizes else {})}
