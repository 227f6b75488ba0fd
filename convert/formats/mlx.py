"""mlx-lm: models with stacked experts (its others are Hugging Face folders), adapters of mlx-lm and mlx-vlm.

In a model (mlx-lm `models/*.py`, `sanitize`) `switch_mlp.<projection>.weight` [experts, out, in] is in place of a
matrix for each expert; if it is quantized, so are `scales` and `biases` (`quantized_weights/methods/mlx.py`).

Adapters are `adapters.safetensors` next to `adapter_config.json`; lora, dora or full. Layout (mlx-lm
`tuner/{lora,dora,utils}.py`): `<module>.lora_a` [in, r] and `<module>.lora_b` [r, out], the transpose of PEFT's; for
experts `lora_a` [experts, r, in] and `lora_b` [experts, out, r]; DoRA's `m`; the update is scale·B·A.
mlx-vlm (`trainer/{lora,utils}.py`) had `<module>.A` and `<module>.B` first, and a config of `rank`, `alpha` and
`dropout`: there the update is alpha·B·A, whatever the rank.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from llmconv.checkpoint import (
    STACKED_BY_MLX,
    Checkpoint,
    is_model_folder,
    open_weights,
    own_file,
    read_json,
    transposed,
)
from llmconv.convert.adapters.adapter import Adapter
from llmconv.convert.adapters.other_tools import ForeignPair, as_adapter, pair_up
from llmconv.convert.algebra import reshaped, split
from llmconv.convert.assembly import side_files_of
from llmconv.convert.fields import Fields
from llmconv.convert.formats import AdapterFormat, Format
from llmconv.convert.models.config_file import plain_fields
from llmconv.convert.models.transformers_source import EMBEDDINGS
from llmconv.errors import MalformedInput, UnsupportedInput, UsageProblem, listing, short
from llmconv.files.safetensors_file import read_header
from llmconv.tensors import LazyTensor

CONFIG, WEIGHTS = "adapter_config.json", "adapters.safetensors"
FACTOR = re.compile(r"(?P<module>.+)\.(?P<part>lora_a|lora_b|m|A|B)")

# Modules with all experts of a layer, and their separate modules on disk (mlx-lm `models/*.py`, `sanitize`)
EXPERTS = {
    "block_sparse_moe.switch_mlp.gate_proj": "block_sparse_moe.experts.{}.w1",
    "block_sparse_moe.switch_mlp.up_proj": "block_sparse_moe.experts.{}.w3",
    "block_sparse_moe.switch_mlp.down_proj": "block_sparse_moe.experts.{}.w2",
    **{f"mlp.switch_mlp.{one}_proj": f"mlp.experts.{{}}.{one}_proj" for one in ("gate", "up", "down")},
    **{
        f"feed_forward.switch_mlp.{one}_proj": f"feed_forward.experts.{{}}.{one}_proj" for one in ("gate", "up", "down")
    },
    "mixer.switch_mlp.fc1": "mixer.experts.{}.up_proj",  # Nemotron-H
    "mixer.switch_mlp.fc2": "mixer.experts.{}.down_proj",
}
MULTIPLIED = ("falcon_h1",)  # model types whose multipliers mlx-lm has in the weights, so that updates are of others
FIRST_ALPHA = 0.1  # of mlx-vlm's first kind, where its config has none
EXPERTS_LIMIT = 4096  # more experts than any layer has
POSITIONS = ("wpe.weight", "embed_positions.weight")


def _detect(path: Path) -> bool:
    folder = path if path.is_dir() else path.parent
    named = path.is_dir() or (path.suffix == ".safetensors" and path.name.endswith(WEIGHTS))
    return named and (folder / CONFIG).is_file() and (path if path.is_file() else folder / WEIGHTS).is_file()


def open_mlx_adapter(path: Path, base: Checkpoint, alpha: float | None = None) -> Adapter:
    """Opens an mlx-lm adapter, its folder or a file in it; `alpha`, which is scale·rank, if the config is ambiguous.

    Raises MalformedInput for keys, shapes or an invalid config, UnsupportedInput for an unknown computation.
    """
    folder = path if path.is_dir() else path.parent
    weights = path if path.is_file() else folder / WEIGHTS
    fields, tensors = read_json(folder / CONFIG), dict(read_header(weights).tensors)
    kind = fields.get("fine_tune_type", "lora")
    if kind == "full":
        from llmconv.quantized_weights.methods.mlx import SAME_WEIGHTS  # noqa: PLC0415 - of adapters of this kind alone

        if (model := base.config.get("model_type")) not in SAME_WEIGHTS:
            raise UnsupportedInput(
                f"`{folder.name}` holds whole weights (`fine_tune_type` full) of a {short(model)}, which mlx-lm may "
                "store differently from the base",
                hint="fuse it with `mlx_lm.fuse`",
            )
        return as_adapter([weights], folder / CONFIG, {"lora_alpha": 1}, {}, others=tensors)
    if kind not in ("lora", "dora"):
        raise UnsupportedInput(
            f"`{folder.name}` has the unsupported `fine_tune_type` {short(kind)!r}",
            hint="lora, dora and full are supported",
        )
    if (model := base.config.get("model_type")) in MULTIPLIED:
        raise UnsupportedInput(
            f"`{folder.name}` is of a {model}, whose multipliers mlx-lm multiplies into the weights: the same factors "
            "are another update of the released ones",
            hint="run it with mlx-lm, or train an adapter with PEFT",
        )
    own = _parameters(fields, alpha)
    factors, others = _factors(tensors, str(kind), folder.name)
    return replace(as_adapter([weights], folder / CONFIG, own, factors, alpha, others), keeps_tie=True)


def _parameters(fields: Mapping[str, Any], alpha: float | None) -> dict[str, Any]:
    """`r` and `lora_alpha` as PEFT's (else MalformedInput); UsageProblem if both `alpha` and `scale` are there."""
    where, hint = "in the adapter config", f"repair `{CONFIG}`, or copy the adapter again"
    if "lora_parameters" not in fields and "rank" in fields:  # mlx-vlm's first kind
        first = Fields(fields, "", where, hint)
        rank = first.count("rank", most=1 << 20)
        return {"r": rank, "lora_alpha": rank * first.number("alpha", default=FIRST_ALPHA, most=1e30)}
    if not isinstance(fields.get("lora_parameters"), dict):
        raise Fields({}, "", where, hint).invalid("lora_parameters", fields.get("lora_parameters"))
    own = Fields(fields["lora_parameters"], "", where, hint)
    rank = own.count("rank", default=8, most=1 << 20)
    if own.get("scale") is None:
        return {"r": rank}
    scale = own.number("scale", most=1e30)
    if own.get("alpha", default=rank) == rank:
        return {"r": rank, "lora_alpha": scale * rank}
    older = own.number("alpha", most=1e30)
    if alpha is None:
        raise UsageProblem(
            f"the adapter config has both `alpha` {older:g} and `scale` {scale:g}: mlx-lm scaled by scale·alpha/rank "
            "until 0.19, and by scale since",
            hint=f"give `--alpha {scale * older:g}` if mlx-lm up to 0.19 trained it, `--alpha {scale * rank:g}` if not",
        )
    return {"r": rank}


def _factors(
    tensors: Mapping[str, LazyTensor], kind: str, source: str
) -> tuple[dict[str, ForeignPair], dict[str, LazyTensor]]:
    """The factors of linear layers, and the tensors of embeddings in PEFT's names."""
    if unknown := [name for name in tensors if not FACTOR.fullmatch(name)]:
        raise MalformedInput(
            f"`{source}` has {len(unknown)} unexpected keys for its `fine_tune_type` {kind}: {listing(unknown)}",
            hint="the adapter has another `fine_tune_type` than its config declares; save it again with mlx-lm",
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
    """`lora_a` [vocab, r] or `lora_b` [r, dim] in PEFT's name; mlx-lm's DoRA scales rows there, PEFT's columns."""
    if part == "m":
        raise UnsupportedInput(
            f"`{source}` has DoRA on the embedding `{module}`, which mlx-lm computes by rows and PEFT by columns",
            hint="fuse it with `mlx_lm.fuse`",
        )
    if len(tensor.shape) != 2:
        raise MalformedInput(
            f"`{module}.{part}` in `{source}` has shape {list(tensor.shape)}", hint="copy the adapter again"
        )
    return {f"{module}.lora_embedding_{part[-1].upper()}": transposed(tensor)}


def _of_experts(module: str, part: str, tensor: LazyTensor, source: str) -> dict[str, LazyTensor]:
    """A matrix per expert, in the names that the experts' weights have on disk."""
    joined = next((name for name in EXPERTS if module.endswith(f".{name}")), None)
    if joined is None or part == "m":
        raise UnsupportedInput(
            f"`{source}` adapts `{module}`, the experts of a model whose names on disk are unknown",
            hint="fuse it with `mlx_lm.fuse`",
        )
    if tensor.num_rows > EXPERTS_LIMIT:
        raise MalformedInput(
            f"`{source}` has {tensor.num_rows:,} experts in `{module}`", hint="no model has that many; is it damaged?"
        )
    root, target = module.removesuffix(joined), EXPERTS[joined]
    matrices = split(reshaped(tensor, (prod(tensor.shape[:2]), tensor.shape[2])), 0, tensor.num_rows)
    return {f"{root}{target.format(number)}.{part}": one for number, one in enumerate(matrices)}


def _has_stacks(path: Path) -> bool:
    if not path.is_dir() or not is_model_folder(path):
        return False
    config = read_json(path / "config.json")
    return config.get("model_type") in STACKED_BY_MLX and any(STACK in name for name in open_weights(path))


def _open_stacks(path: Path, config: Mapping[str, Any], tokenizer: Path | None) -> Checkpoint:
    """The model with a matrix for each expert, codes as their values in float32."""
    from llmconv.quantized_weights.quantized_checkpoint import FIELD, is_mlx, quantized_checkpoint  # noqa: PLC0415

    stored, warnings = read_json(own_file(path, "config.json")), list[str]()
    settings = {**stored, **plain_fields(config, warnings)}
    tensors: dict[str, LazyTensor] = {}
    given = stored.get("quantization") or stored.get(FIELD)
    quantization: dict[str, Any] = {**given} if given and is_mlx(given) else {}
    for name, tensor in open_weights(path).items():
        module, _, part = name.rpartition(".")
        if STACK not in name:
            tensors[name] = tensor
            continue
        if len(tensor.shape) != 3 or 0 in tensor.shape:
            raise MalformedInput(
                f"`{name}` in `{path.name}` has shape {list(tensor.shape)}, not that of stacked experts",
                hint="copy or download the model again",
            )
        experts = _of_experts(module, part, tensor, path.name)
        tensors |= experts
        if module in quantization:  # its bits are those of each expert
            quantization |= {one.removesuffix(f".{part}"): quantization[module] for one in experts}
    opened = Checkpoint(path, "mlx", tensors, settings, side_files_of(path, tokenizer), tuple(warnings))
    if not quantization:
        return opened
    found = quantized_checkpoint(replace(opened, config={**settings, FIELD: quantization}))
    return found.plain if found else opened


STACK = ".switch_mlp."
FORMAT = Format(
    name="mlx",
    title="MLX: a folder of mlx-lm with the experts of a layer in one matrix, `switch_mlp`",
    detect=_has_stacks,
    open=_open_stacks,
    covers="Mixtral, Qwen 2 and 3 MoE, OLMoE, Phi MoE and GLM 4 MoE, in floats or quantized (the values of the codes); "
    "other models of mlx-lm are Hugging Face folders already",
)
ADAPTER = AdapterFormat(
    "mlx-lm and mlx-vlm (`adapters.safetensors` next to `adapter_config.json`)", _detect, open_mlx_adapter
)
