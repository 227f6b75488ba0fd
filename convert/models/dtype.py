"""The element type of a model's weights: checked by name, cast, and recorded in its configuration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llmconv.checkpoint import Checkpoint
from llmconv.errors import UsageProblem
from llmconv.tensors import BY_NAME, FLOATS, LazyTensor, cast


def check_dtype(dtype: str) -> None:
    """Refuses a name that is not an element type of weights.

    Raises:
        UsageProblem: neither `keep` nor a float type.
    """
    if dtype not in ("keep", *FLOATS):
        raise UsageProblem(f"unknown dtype `{dtype}`", hint="keep, float32, float16 or bfloat16")


def with_cast(checkpoint: Checkpoint, dtype: str) -> Checkpoint:
    """The checkpoint with its float weights rounded to `dtype` (or kept), and a config that says what they are."""
    tensors = dict(checkpoint.tensors)
    if dtype != "keep":
        tensors = {name: cast(tensor, BY_NAME[dtype], name) for name, tensor in tensors.items()}
    adapter = checkpoint.adapter
    if adapter and dtype != "keep":
        own = {name: cast(tensor, BY_NAME[dtype], name) for name, tensor in adapter.tensors.items()}
        adapter = replace(adapter, tensors=own)
    return replace(checkpoint, tensors=tensors, config=with_dtype(checkpoint.config, tensors), adapter=adapter)


def with_dtype(config: Mapping[str, Any], tensors: Mapping[str, LazyTensor]) -> dict[str, Any]:
    """The config with `torch_dtype` (or `dtype`, where it has that) set to what most of the weights are."""
    sizes: Counter[str] = Counter()
    for tensor in tensors.values():
        if tensor.dtype.name.startswith(("float", "bfloat")):
            sizes[tensor.dtype.name] += tensor.nbytes
    field = "dtype" if "dtype" in config and "torch_dtype" not in config else "torch_dtype"
    kept = {name: value for name, value in config.items() if name not in ("dtype", "torch_dtype")}
    return {**kept, **({field: sizes.most_common(1)[0][0]} if sizes else {})}
