"""mlx-lm's adapters: `adapters.safetensors` beside `adapter_config.json`, whose `fine_tune_type` is lora, dora or full.

Layout (mlx-lm `tuner/{lora,dora,utils}.py`): `<module>.lora_a` (in×r) and `<module>.lora_b` (r×out), the transpose of
PEFT's; of experts `lora_a` (experts×r×in) and `lora_b` (experts×out×r); DoRA's `m`; the update is scale·B·A.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmconv.checkpoint import Checkpoint, read_json
from llmconv.convert.adapters.adapter import Adapter
from llmconv.convert.adapters.other_tools import AdapterFormat
from llmconv.convert.adapters.other_tools.factors import ForeignPair, as_adapter, pair_up
from llmconv.convert.algebra.operations import listing
from llmconv.convert.algebra.transpose import transposed
from llmconv.convert.models.blueprint.names import EMBEDDINGS
from llmconv.errors import MalformedInput, UnsupportedInput, UsageProblem
from llmconv.files.safetensors_file import read_header
from llmconv.tensors import LazyTensor

CONFIG, WEIGHTS = "adapter_config.json", "adapters.safetensors"
FACTOR = re.compile(r"(?P<module>.+)\.(?P<part>lora_a|lora_b|m)")

EXPERTS = {
    "block_sparse_moe.switch_mlp.gate_proj": "block_sparse_moe.experts.{}.w1",
    "block_sparse_moe.switch_mlp.up_proj": "block_sparse_moe.experts.{}.w3",
    "block_sparse_moe.switch_mlp.down_proj": "block_sparse_moe.experts.{}.w2",
    **{f"mlp.switch_mlp.{one}_proj": f"mlp.experts.{{}}.{one}_proj" for one in ("gate", "up", "down")},
}
"""The experts of a layer in one module, and the modules that they are on disk (mlx-lm `models/*.py`, `sanitize`)."""

EXPERTS_LIMIT = 4096
"""More than any model has in a layer."""

POSITIONS = ("wpe.weight", "embed_positions.weight")

SAME_WEIGHTS = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "olmo2", "stablelm"),
    *("starcoder2", "granite", "cohere", "cohere2", "smollm3", "internlm2"),
)
"""Model types whose weights mlx-lm keeps as they are, under the same names, so that whole ones can be taken back."""


def is_mlx_adapter(path: Path) -> bool:
    """Whether `path` is an mlx-lm adapter folder, or the weights file in one."""
    folder = path if path.is_dir() else path.parent
    named = path.is_dir() or (path.suffix == ".safetensors" and path.name.endswith(WEIGHTS))
    return named and (folder / CONFIG).is_file() and (path if path.is_file() else folder / WEIGHTS).is_file()


def open_mlx_adapter(path: Path, base: Checkpoint, alpha: float | None = None) -> Adapter:
    """Opens an mlx-lm adapter, made on a base of the same weights.

    Args:
        path: the folder, or a weights file in it (mlx-lm keeps earlier ones as `0000100_adapters.safetensors`).
        base: the model to merge into.
        alpha: scale·rank; only where the config does not say it without doubt.

    Raises:
        MalformedInput: tensors of no known name or shape, or a config that is damaged.
        UnsupportedInput: a kind of module or model for which the merged weight is not known.
    """
    folder = path if path.is_dir() else path.parent
    weights = path if path.is_file() else folder / WEIGHTS
    fields, tensors = read_json(folder / CONFIG), dict(read_header(weights).tensors)
    kind = fields.get("fine_tune_type", "lora")
    if kind == "full":
        _require_same_weights(base, folder.name)
        return as_adapter([weights], folder / CONFIG, {"lora_alpha": 1}, {}, others=tensors)
    if kind not in ("lora", "dora"):
        raise UnsupportedInput(
            f"`{folder.name}` has `fine_tune_type` {str(kind)[:40]!r}", hint="known are lora, dora and full"
        )
    own = _parameters(fields, alpha)
    factors, others = _factors(tensors, str(kind), folder.name)
    return replace(as_adapter([weights], folder / CONFIG, own, factors, alpha, others), keeps_tie=True)


def _parameters(fields: Mapping[str, Any], alpha: float | None) -> dict[str, Any]:
    """`r` and `lora_alpha` under PEFT's names.

    Raises:
        MalformedInput: a value of the wrong kind.
        UsageProblem: both `alpha` and `scale` are in the file, and nobody says which formula was used.
    """
    own = fields.get("lora_parameters")
    if not isinstance(own, dict):
        raise _damaged("lora_parameters", own)
    rank, scale = own.get("rank", 8), own.get("scale")
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 < rank < 1 << 20:
        raise _damaged("rank", rank)
    if scale is None:
        return {"r": rank}
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 < scale < 1e30:
        raise _damaged("scale", scale)
    older = own.get("alpha")
    if older is None or older == rank:
        return {"r": rank, "lora_alpha": scale * rank}
    if isinstance(older, bool) or not isinstance(older, int | float) or not 0 < older < 1e30:
        raise _damaged("alpha", older)
    if alpha is None:
        raise UsageProblem(
            f"the adapter config has both `alpha` {older} and `scale` {scale}, of which mlx-lm made scale·alpha/rank "
            "until 0.19 and makes scale since",
            hint=f"give `--alpha {scale * older:g}` if mlx-lm up to 0.19 trained it, `--alpha {scale * rank:g}` if not",
        )
    return {"r": rank}


def _damaged(name: str, value: Any) -> MalformedInput:
    return MalformedInput(
        f"the adapter config has {str(value)[:40]!r} for `{name}`", hint=f"repair `{CONFIG}`, or copy the adapter again"
    )


def _factors(
    tensors: Mapping[str, LazyTensor], kind: str, source: str
) -> tuple[dict[str, ForeignPair], dict[str, LazyTensor]]:
    """The factors of linear layers, and the tensors of embeddings under PEFT's names."""
    unknown = [name for name in tensors if not FACTOR.fullmatch(name)]
    if unknown:
        raise MalformedInput(
            f"`{source}` holds {len(unknown)} tensors that are no {kind} (its `fine_tune_type`): {listing(unknown)}",
            hint="the adapter is of another kind than its config says; save it again with mlx-lm",
        )
    linear: dict[str, LazyTensor] = {}
    others: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        module, _, part = name.rpartition(".")
        if f"{module}.weight".endswith((*EMBEDDINGS, *POSITIONS)):
            others |= _of_embedding(module, part, tensor, source)
        elif len(tensor.shape) == 3:
            linear |= _of_experts(module, part, tensor, source)
        else:
            linear[name] = transposed(tensor) if len(tensor.shape) == 2 else tensor
    return pair_up(linear, FACTOR, source), others


def _of_embedding(module: str, part: str, tensor: LazyTensor, source: str) -> dict[str, LazyTensor]:
    """`lora_a` (vocab×r), `lora_b` (r×dim), under PEFT's names; mlx-lm's DoRA scales rows there, PEFT's columns."""
    if part == "m":
        raise UnsupportedInput(
            f"`{source}` has DoRA on the embedding `{module}`, which mlx-lm computes by rows and transformers' PEFT by "
            "columns",
            hint="fuse it with `mlx_lm.fuse`",
        )
    if len(tensor.shape) != 2:
        raise MalformedInput(
            f"`{module}.{part}` in `{source}` has shape {list(tensor.shape)}", hint="copy the adapter again"
        )
    return {f"{module}.lora_embedding_{part[-1].upper()}": transposed(tensor)}


def _of_experts(module: str, part: str, tensor: LazyTensor, source: str) -> dict[str, LazyTensor]:
    """A matrix per expert, under the names that their weights have on disk."""
    place = next((place for place in EXPERTS if module.endswith(f".{place}")), None)
    if place is None or part == "m":
        raise UnsupportedInput(
            f"`{source}` adapts `{module}`, experts in one module of a model whose names on disk are not known here",
            hint="fuse it with `mlx_lm.fuse`",
        )
    if tensor.num_rows > EXPERTS_LIMIT:
        raise MalformedInput(
            f"`{source}` has {tensor.num_rows:,} experts in `{module}`", hint="no model has so many; is it damaged?"
        )
    root, target = module.removesuffix(place), EXPERTS[place]
    return {f"{root}{target.format(number)}.{part}": _expert(tensor, number) for number in range(tensor.shape[0])}


def _expert(tensor: LazyTensor, number: int) -> LazyTensor:
    """The matrix of one expert."""
    return LazyTensor(
        tensor.dtype, tensor.shape[1:], lambda start, stop: tensor.rows(number, number + 1)[0, start:stop]
    )


def _require_same_weights(base: Checkpoint, source: str) -> None:
    kind = base.config.get("model_type")
    if kind not in SAME_WEIGHTS:
        raise UnsupportedInput(
            f"`{source}` holds whole weights (`fine_tune_type` full) of a {str(kind)[:40]}, which mlx-lm may keep in "
            "another form than the base",
            hint="fuse it with `mlx_lm.fuse`",
        )


ADAPTER = AdapterFormat(
    title="mlx-lm (`adapters.safetensors` beside `adapter_config.json`)", detect=is_mlx_adapter, open=open_mlx_adapter
)
