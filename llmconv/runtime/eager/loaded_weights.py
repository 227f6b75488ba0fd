"""Whether transformers loaded the weights of a folder: it leaves some out, casts others and only warns."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from llmconv.errors import MalformedInput, listing
from llmconv.tensors import LazyTensor

BUFFERS = ("rotary_emb.inv_freq", "attn.bias", "attn.masked_bias", "attention.rope.freqs")
"""Ends of the names of values that models compute, which old checkpoints store."""


def require_loaded(model: Any, report: Mapping[str, Any], stored: Mapping[str, LazyTensor], folder: Path) -> None:
    """Requires that a model consists of the folder's weights, and these are all of its modules' weights.

    Tensors of modules that the model does not have, such as a vision tower beside a language model, may be left over.

    Args:
        model: from `from_pretrained`.
        report: its `output_loading_info`.
        stored: the folder's tensors by name.
        folder: for the message.

    Raises:
        MalformedInput: weights are missing (transformers makes them up at random), the model leaves out weights of its
            own modules or of further layers, or weights are integers without a quantization that explains them.
    """
    if names := sorted(report["missing_keys"]):
        raise MalformedInput(
            f"missing keys: {len(names)} tensors of the model are not in `{folder}`, first `{names[0]}`",
            hint="is this the config.json of these weights?",
        )
    parameters = {name for name, _ in model.named_parameters()}
    if names := _left_out(report["unexpected_keys"], parameters):
        raise MalformedInput(
            f"{len(names)} unexpected keys: `{folder}` has weights that its model would leave out: {listing(names)}",
            hint="`config.json` describes another model, or another number of layers",
        )
    is_quantized = getattr(model, "hf_quantizer", None) is not None
    names = [name for name in stored if name in parameters or name.endswith(".weight")]
    kinds = {name: stored[name].dtype.name for name in names if "float" not in stored[name].dtype.name}
    if kinds and not is_quantized:
        listed = listing([f"{name} ({kind})" for name, kind in kinds.items()])
        raise MalformedInput(
            f"`{folder}` has {len(kinds)} weights that are integers, and no quantization of `config.json` explains "
            f"them: {listed}",
            hint="copy the folder's own `config.json` again, or give the weights from before quantization",
        )


def _left_out(unexpected: Iterable[str], parameters: Iterable[str]) -> list[str]:
    """Unexpected tensors of modules that the model has, if only with another number."""
    modules = {_module(name) for name in parameters}
    ends = {module[at:] for module in modules for at in _starts(module)}  # the folder of a model without its head
    return [name for name in sorted(unexpected) if _module(name) in ends and not name.endswith(BUFFERS)]


def _module(name: str) -> str:
    """The module of a tensor, with `*` for every number: `model.layers.*.mlp.up_proj`."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name.rpartition(".")[0])


def _starts(module: str) -> list[int]:
    """Where the module's own name and its name without the first part begin."""
    return [0, module.index(".") + 1] if "." in module else [0]
