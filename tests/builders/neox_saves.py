"""Runs of GPT-NeoX made of transformers' models with random weights, and GPT-NeoX's own computation of such files.

`logits` follows `megatron/model/transformer.py` on the ranks' files and shares no code with the reader: each rank
computes its heads and its columns, and the outputs of the ranks are added up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

Parts = dict[tuple[int, int], dict[str, Any]]
"""By module and rank: name to tensor."""

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 8, "vocab_size": 24}
KEPT = ("num_layers", "hidden_size", "num_attention_heads")  # of the arguments, in the files of ranks
SHARED: dict[str, Any] = {
    "num-layers": 2,
    "hidden-size": 32,
    "num-attention-heads": 8,
    "max-position-embeddings": 64,
    "seq-length": 64,
    "pos-emb": "rotary",
    "no-weight-tying": True,
    "lr_decay_style": "cosine",
    "fp16": {"enabled": True},
}
NEOX = {"model_type": "gpt_neox", "intermediate_size": 128, "rotary_pct": 0.5, "use_parallel_residual": True}
LLAMA = {
    "model_type": "llama",
    "intermediate_size": 48,
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "mlp_bias": False,
    "num_key_value_heads": 8,
    "rope_theta": 5000.0,
}
GATED = {
    "norm": "rmsnorm",
    "rms_norm_epsilon": 1.0e-5,
    "activation": "swiglu",
    "rotary-emb-base": 5000,
    "use_bias_in_attn_linear": False,
    "use_bias_in_mlp": False,
    "attention-config": [[["flash"], 2]],
}


@dataclass(frozen=True)
class Kind:
    """A family as transformers and as GPT-NeoX configure it."""

    config: Mapping[str, Any]
    arguments: Mapping[str, Any]
    old: bool = False  # names, and the order of rows, of 2023
    ranks: tuple[int, ...] = field(default=(1, 2, 4))

    @property
    def all_arguments(self) -> dict[str, Any]:
        return {**SHARED, **self.arguments}


KINDS = {
    "neox": Kind(NEOX, {"rotary-pct": 0.5, "gpt_j_residual": True}),
    "neox: in turn": Kind({**NEOX, "use_parallel_residual": False}, {"rotary-pct": 0.5, "norm": "layernorm"}, old=True),
    "neox: fused gelu": Kind(
        {**NEOX, "hidden_act": "gelu_fast", "tie_word_embeddings": True},
        {"rotary-pct": 0.5, "gpt-j-residual": True, "bias-gelu-fusion": True, "no-weight-tying": False},
        old=True,
    ),
    "neox: no biases of attention": Kind(
        {**NEOX, "attention_bias": False, "hidden_act": "silu"},
        {"rotary-pct": 0.5, "gpt_j_residual": True, "use_bias_in_attn_linear": False, "activation": "swish"},
    ),
    "llama": Kind(LLAMA, GATED),
    "llama of 2023": Kind(LLAMA, {**GATED, "activation": "silu", "mlp_type": "llama"}, old=True),
    "llama: fewer keys": Kind({**LLAMA, "num_key_value_heads": 4}, {**GATED, "num_kv_heads": 4}),
    "llama of 2024: fewer keys": Kind(
        {**LLAMA, "num_key_value_heads": 4}, {**GATED, "num_kv_heads": 4, "activation": "silu"}, old=True
    ),
    "llama: biases": Kind(
        {**LLAMA, "attention_bias": True, "mlp_bias": True},
        {**GATED, "use_bias_in_attn_linear": True, "use_bias_in_mlp": True},
    ),
    "mistral": Kind(
        {**LLAMA, "model_type": "mistral", "num_key_value_heads": 4, "sliding_window": 4},
        {**GATED, "num_kv_heads": 4, "sliding_window_width": 3},
    ),
}


def model_of(kind: Kind, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' model, all weights random; those of biases are multiples of 1/64, so that sums are exact."""
    torch.manual_seed(0)
    extra = {name: value for name, value in kind.config.items() if name != "model_type"}
    own = {"tie_word_embeddings": False, "max_position_embeddings": 64, **SIZES, **extra}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind.config["model_type"], **own))
    for name, value in model.named_parameters():
        noise = torch.randn(value.shape) * 0.3
        value.data = (noise * 64).round() / 64 if name.endswith("bias") else noise + ("norm" in name)
    return model.to(dtype).eval()


def state_of(kind: Kind, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """The weights of `model_of` under the names that transformers writes."""
    head = "embed_out" if kind.config["model_type"] == "gpt_neox" else "lm_head"
    state = model_of(kind, dtype).state_dict()
    return {name.replace("lm_head", head): value for name, value in state.items()}


def split(state: Mapping[str, Any], kind: Kind, ranks: int) -> Parts:
    """The tensors of each module on each rank."""
    layers, neox = SIZES["num_hidden_layers"], kind.config["model_type"] == "gpt_neox"
    stack, norm, words, head = (
        ("gpt_neox.layers", "gpt_neox.final_layer_norm", "gpt_neox.embed_in", "embed_out")
        if neox
        else ("model.layers", "model.norm", "model.embed_tokens", "lm_head")
    )
    parts: Parts = {}
    for rank in range(ranks):
        parts[0, rank] = {"word_embeddings.weight": state[f"{words}.weight"].chunk(ranks)[rank].clone()}
        if kind.all_arguments["no-weight-tying"]:
            parts[layers + 4, rank] = {"final_linear.weight": state[f"{head}.weight"].chunk(ranks)[rank].clone()}
        scale = "weight" if neox else "scale"
        parts[layers + 3, rank] = {f"norm.{scale}": state[f"{norm}.weight"].clone()}
        if neox:
            parts[layers + 3, rank]["norm.bias"] = state[f"{norm}.bias"].clone()
        for number in range(layers):
            prefix = f"{stack}.{number}."
            own = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
            parts[number + 2, rank] = (_neox if neox else _llama)(own, kind, rank, ranks)
    return parts


def _share(bias: Any, rank: int, ranks: int, *, summed: bool) -> Any:
    """A rank's bias of a row-parallel layer: its own summand, or the same on every rank."""
    if not summed or ranks == 1:
        return bias.clone()
    generator = torch.Generator().manual_seed(len(bias))
    others = (torch.randn((ranks - 1, *bias.shape), generator=generator) * 8).round() / 64
    others = others.to(bias.dtype)
    return others[rank - 1] if rank else bias - others.sum(0)


def _neox(own: Mapping[str, Any], kind: Kind, rank: int, ranks: int) -> dict[str, Any]:
    names = {} if kind.old else {"mlp.dense_h_to_4h": "mlp.linear1", "mlp.dense_4h_to_h": "mlp.linear2"}
    found = {}
    for name, value in own.items():
        module, _, what = name.rpartition(".")
        if "layernorm" in module:
            part = value.clone()
        elif module in ("attention.dense", "mlp.dense_4h_to_h"):
            summed = kind.config["use_parallel_residual"]
            part = (
                value.chunk(ranks, 1)[rank].clone() if what == "weight" else _share(value, rank, ranks, summed=summed)
            )
        else:
            part = value.chunk(ranks, 0)[rank].clone()
        found[f"{names.get(module, module)}.{what}"] = part
    return found


def _llama(own: Mapping[str, Any], kind: Kind, rank: int, ranks: int) -> dict[str, Any]:
    heads, keys = SIZES["num_attention_heads"], kind.config["num_key_value_heads"]

    def rows(name: str, what: str) -> Any:
        return own[f"{name}.{what}"].chunk(ranks)[rank]

    found = {
        "input_layernorm.scale": own["input_layernorm.weight"].clone(),
        "post_attention_layernorm.scale": own["post_attention_layernorm.weight"].clone(),
        "attention.dense.weight": own["self_attn.o_proj.weight"].chunk(ranks, 1)[rank].clone(),
        ("mlp.w2.weight" if kind.old else "mlp.linear2.weight"): own["mlp.down_proj.weight"]
        .chunk(ranks, 1)[rank]
        .clone(),
    }
    for what in ("weight", "bias"):
        if f"self_attn.q_proj.{what}" in own:
            q, k, v = (rows(f"self_attn.{one}_proj", what) for one in "qkv")
            if keys == heads or kind.old:  # by head
                q, k, v = (one.reshape(heads // ranks, -1, *one.shape[1:]) for one in (q, k, v))
                fused = torch.cat([q, k, v], 1).flatten(0, 1)
            else:
                fused = torch.cat([q, k, v])
            found[f"attention.query_key_value.{what}"] = fused.clone()
        if f"mlp.gate_proj.{what}" in own:
            gate, up = (rows(f"mlp.{one}_proj", what).clone() for one in ("gate", "up"))
            if kind.old:
                found |= {f"mlp.w1.{what}": gate, f"mlp.w3.{what}": up}
            else:
                found[f"mlp.linear1.{what}"] = torch.cat([up, gate])
    for target, source in (("attention.dense", "self_attn.o_proj"), ("mlp.linear2", "mlp.down_proj")):
        if f"{source}.bias" in own:
            found[f"{target}.bias"] = own[f"{source}.bias"].clone()
    return found


def write(folder: Path, parts: Parts, arguments: Mapping[str, Any], *, pipeline: bool = True) -> Path:
    """A run with one step; returns its folder."""
    step = folder / "global_step7"
    (step / "configs").mkdir(parents=True)
    (folder / "latest").write_text("global_step7")
    ranks = max(rank for _, rank in parts) + 1
    given = {**arguments, "model-parallel-size": ranks, "pipe-parallel-size": int(pipeline)}
    (step / "configs" / "model.yml").write_text(yaml.safe_dump(given))
    (step / "configs" / "local.yml").write_text(yaml.safe_dump({"data-path": "x", "vocab-file": "/data/words.json"}))
    for rank in range(ranks):
        own = {number: tensors for (number, one), tensors in parts.items() if one == rank}
        module = {f"sequential.{number}.{name}": value for number, one in own.items() for name, value in one.items()}
        sizes = {name: arguments[name.replace("_", "-")] for name in KEPT}
        state = {"module": None if pipeline else module, "optimizer": None, "args": sizes, "ds_version": "0.16.3"}
        torch.save(state, step / f"mp_rank_{rank:02d}_model_states.pt")
        for number, tensors in own.items() if pipeline else ():
            torch.save(tensors, step / f"layer_{number:02d}-model_{rank:02d}-model_states.pt")
    return folder


def save_neox(folder: Path, name: str = "neox", ranks: int = 1, *, pipeline: bool = True, **changes: Any) -> Path:
    """A run of a kind of `KINDS`, with other arguments."""
    kind = KINDS[name]
    parts = split(state_of(kind), kind, ranks)
    return write(folder, parts, {**kind.all_arguments, **changes}, pipeline=pipeline)


def logits(parts: Parts, kind: Kind, ids: Any) -> Any:
    """The logits [tokens, words] that GPT-NeoX computes with these files, of one text."""
    arguments = {name.replace("-", "_"): value for name, value in kind.all_arguments.items()}
    ranks = range(max(rank for _, rank in parts) + 1)
    layers = arguments["num_layers"]
    x = torch.cat([parts[0, rank]["word_embeddings.weight"] for rank in ranks])[ids]
    for number in range(2, layers + 2):
        own = [parts[number, rank] for rank in ranks]
        if arguments.get("gpt_j_residual"):
            outputs = [
                one + _bias(part, "attention.dense") + two + _bias(part, "mlp.linear2", "mlp.dense_4h_to_h")
                for part, one, two in zip(own, attended(own, x, kind), through(own, x, arguments), strict=True)
            ]
            x = x + sum(outputs)
        else:
            x = x + sum(attended(own, x, kind)) + _bias(own[-1], "attention.dense")
            x = x + sum(through(own, x, arguments)) + _bias(own[-1], "mlp.linear2", "mlp.dense_4h_to_h")
    x = _norm(parts[layers + 3, 0], "norm", x, arguments)
    embedding = [parts[0, rank]["word_embeddings.weight"] for rank in ranks]
    head = [parts.get((layers + 4, rank), {}).get("final_linear.weight", embedding[rank]) for rank in ranks]
    return torch.cat([x @ one.T for one in head], -1)


def attended(own: list[dict[str, Any]], x: Any, kind: Kind) -> list[Any]:
    """The output of attention of each rank, without bias."""
    arguments = kind.all_arguments
    return [_attention(part, _norm(part, "input_layernorm", x, arguments), kind, len(own)) for part in own]


def through(own: list[dict[str, Any]], x: Any, arguments: Mapping[str, Any]) -> list[Any]:
    """The output of the MLP of each rank, without bias."""
    return [_mlp(part, _norm(part, "post_attention_layernorm", x, arguments), arguments) for part in own]


def _bias(part: Mapping[str, Any], *names: str) -> Any:
    return next((part[f"{name}.bias"] for name in names if f"{name}.bias" in part), 0)


def _norm(part: Mapping[str, Any], name: str, x: Any, arguments: Mapping[str, Any]) -> Any:
    if arguments.get("norm") == "rmsnorm":
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + arguments["rms_norm_epsilon"]) * part[f"{name}.scale"]
    return functional.layer_norm(x, x.shape[-1:], part[f"{name}.weight"], part[f"{name}.bias"], 1e-5)


def _attention(part: Mapping[str, Any], x: Any, kind: Kind, ranks: int) -> Any:
    arguments = {name.replace("-", "_"): value for name, value in kind.all_arguments.items()}
    heads = arguments["num_attention_heads"] // ranks
    keys = arguments.get("num_kv_heads", arguments["num_attention_heads"]) // ranks
    size, count = arguments["hidden_size"] // arguments["num_attention_heads"], len(x)
    mixed = x @ part["attention.query_key_value.weight"].T + part.get("attention.query_key_value.bias", 0)
    if keys == heads:
        q, k, v = mixed.view(count, heads, 3 * size).chunk(3, -1)
    elif kind.old:
        own = size * keys // heads
        q, k, v = mixed.view(count, heads, size + 2 * own).split((size, own, own), -1)
    else:
        q, k, v = mixed.split((heads * size, keys * size, keys * size), -1)
    q, k, v = (one.reshape(count, -1, size) for one in (q, k, v))
    turned = int(size * arguments.get("rotary_pct", 1.0))
    frequency = arguments.get("rotary_emb_base", 10000) ** (-torch.arange(0, turned, 2) / turned)
    angles = torch.outer(torch.arange(count), frequency).repeat(1, 2)[:, None]

    def rotated(one: Any) -> Any:
        first, second, rest = one.split((turned // 2, turned // 2, size - turned), -1)
        first, second = (  # halves of what is turned
            first * angles.cos()[..., : turned // 2] - second * angles.sin()[..., : turned // 2],
            second * angles.cos()[..., : turned // 2] + first * angles.sin()[..., : turned // 2],
        )
        return torch.cat([first, second, rest], -1)

    q, k = rotated(q), rotated(k)
    k, v = (one.repeat_interleave(heads // keys, 1) for one in (k, v))
    mask = torch.ones(count, count).tril()
    if (width := arguments.get("sliding_window_width")) is not None:
        mask = mask.triu(-width)
    scores = torch.einsum("qhd,khd->hqk", q, k) / size**0.5
    weights = scores.masked_fill(mask < 0.5, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v).reshape(count, -1) @ part["attention.dense.weight"].T


def _mlp(part: Mapping[str, Any], x: Any, arguments: Mapping[str, Any]) -> Any:
    if "mlp.w1.weight" in part:
        return functional.silu(x @ part["mlp.w1.weight"].T) * (x @ part["mlp.w3.weight"].T) @ part["mlp.w2.weight"].T
    first, last = ("mlp.linear1", "mlp.linear2")
    if f"{first}.weight" not in part:
        first, last = ("mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
    inner = x @ part[f"{first}.weight"].T + part.get(f"{first}.bias", 0)
    if arguments.get("activation") == "swiglu":
        up, gate = inner.chunk(2, -1)
        inner = functional.silu(gate) * up
    elif arguments.get("activation") == "swish":
        inner = inner * inner.sigmoid()
    elif arguments.get("bias_gelu_fusion"):
        inner = inner * 0.5 * (1.0 + torch.tanh(0.79788456 * inner * (1 + 0.044715 * inner * inner)))
    else:
        inner = functional.gelu(inner)
    return inner @ part[f"{last}.weight"].T
