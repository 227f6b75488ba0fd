"""Megatron saves made here, after its published layout: any grid of ranks, names of both ages, any dtype."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

State = dict[str, torch.Tensor]

OLD = {
    "self_attention.linear_qkv": "self_attention.query_key_value",
    "self_attention.linear_proj": "self_attention.dense",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "mlp.linear_fc1": "mlp.dense_h_to_4h",
    "mlp.linear_fc2": "mlp.dense_4h_to_h",
}
ENGINE = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}


@dataclass(frozen=True)
class Shape:
    """A gated model with RMSNorm and rotary positions, and the grid that its save is divided by."""

    layers: int = 4
    hidden: int = 16
    heads: int = 4
    groups: int = 2
    inner: int = 24
    words: int = 30
    padded: int = 32
    experts: int = 0
    qk_norm: bool = False
    qkv_bias: bool = False
    tied: bool = False
    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    expert: int = 1
    expert_tensor: int | None = None
    dtype: torch.dtype = torch.float32

    @property
    def dim(self) -> int:
        """Rows of a head."""
        return self.hidden // self.heads

    def arguments(self, **changes: Any) -> Namespace:
        """The arguments of the run."""
        fields = {
            "num_layers": self.layers,
            "hidden_size": self.hidden,
            "ffn_hidden_size": self.inner,
            "num_attention_heads": self.heads,
            "group_query_attention": self.groups != self.heads,
            "num_query_groups": self.groups,
            "num_experts": self.experts or None,
            "moe_router_topk": 2,
            "qk_layernorm": self.qk_norm,
            "add_qkv_bias": self.qkv_bias,
            "max_position_embeddings": 64,
            "position_embedding_type": "rope",
            "normalization": "RMSNorm",
            "swiglu": True,
            "add_bias_linear": False,
            "untie_embeddings_and_output_weights": not self.tied,
            "padded_vocab_size": self.padded,
            "tensor_model_parallel_size": self.tensor,
            "pipeline_model_parallel_size": self.pipeline,
            "expert_model_parallel_size": self.expert,
            "params_dtype": self.dtype,
        }
        if self.expert_tensor:
            fields["expert_tensor_parallel_size"] = self.expert_tensor
        return Namespace(**fields | changes)


def hugging_face_state(shape: Shape) -> State:
    """The model in Hugging Face's names, with random weights and a padded vocabulary."""
    torch.manual_seed(0)
    queries, keys = shape.heads * shape.dim, shape.groups * shape.dim
    state = {"model.embed_tokens.weight": (shape.padded, shape.hidden), "model.norm.weight": (shape.hidden,)}
    if not shape.tied:
        state["lm_head.weight"] = (shape.padded, shape.hidden)
    for layer in (f"model.layers.{number}" for number in range(shape.layers)):
        for name, rows in {"q": queries, "k": keys, "v": keys}.items():
            state[f"{layer}.self_attn.{name}_proj.weight"] = (rows, shape.hidden)
            if shape.qkv_bias:
                state[f"{layer}.self_attn.{name}_proj.bias"] = (rows,)
            if shape.qk_norm and name != "v":
                state[f"{layer}.self_attn.{name}_norm.weight"] = (shape.dim,)
        state[f"{layer}.self_attn.o_proj.weight"] = (shape.hidden, queries)
        state |= {f"{layer}.{name}.weight": (shape.hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
        for stem, own in feed_forward(shape, layer).items():
            state[f"{stem}{own[0]}.weight"] = state[f"{stem}{own[1]}.weight"] = (shape.inner, shape.hidden)
            state[f"{stem}{own[2]}.weight"] = (shape.hidden, shape.inner)
        if shape.experts:
            state[router(shape, layer)] = (shape.experts, shape.hidden)
    return {name: torch.randn(*size).to(shape.dtype) for name, size in state.items()}


def feed_forward(shape: Shape, layer: str) -> dict[str, tuple[str, str, str]]:
    """Prefix to the names of gate, up and down, for each expert in turn."""
    plain = ("gate_proj", "up_proj", "down_proj")
    if not shape.experts:
        return {f"{layer}.mlp.": plain}
    stem, names = ("mlp", plain) if shape.qk_norm else ("block_sparse_moe", ("w1", "w3", "w2"))
    return {f"{layer}.{stem}.experts.{expert}.": names for expert in range(shape.experts)}


def router(shape: Shape, layer: str) -> str:
    """Name of the router's weight."""
    return f"{layer}.{'mlp' if shape.qk_norm else 'block_sparse_moe'}.gate.weight"


def kept(shape: Shape, state: Mapping[str, torch.Tensor]) -> State:
    """The tensors that the conversion has to return: without the padding of the vocabulary."""
    return {
        name: tensor[: shape.words] if name in ("model.embed_tokens.weight", "lm_head.weight") else tensor
        for name, tensor in state.items()
    }


def rank_state(shape: Shape, state: Mapping[str, torch.Tensor], place: tuple[int, int, int, int]) -> State:
    """The tensors of one rank and virtual stage in Megatron core's names, layers counted from 0.

    Args:
        shape: of the model.
        state: from `hugging_face_state`.
        place: tensor, pipeline and expert rank, and virtual stage.
    """
    tensor, pipeline, expert, virtual = place
    per = shape.layers // (shape.pipeline * shape.virtual)
    first = (virtual * shape.pipeline + pipeline) * per
    own: State = {}
    if pipeline == virtual == 0:
        own["embedding.word_embeddings.weight"] = state["model.embed_tokens.weight"].chunk(shape.tensor)[tensor]
    for number in range(per):
        layer, core = f"model.layers.{first + number}", f"decoder.layers.{number}"
        own |= _attention(shape, state, layer, core, tensor)
        own |= _feed_forward(shape, state, layer, core, (tensor, expert))
    if (pipeline, virtual) == (shape.pipeline - 1, shape.virtual - 1):
        own["decoder.final_layernorm.weight"] = state["model.norm.weight"]
        head = state["model.embed_tokens.weight" if shape.tied else "lm_head.weight"]
        if not shape.tied or shape.pipeline > 1:
            own["output_layer.weight"] = head.chunk(shape.tensor)[tensor]
    return {name: part.clone() for name, part in own.items()}


def _attention(shape: Shape, state: Mapping[str, torch.Tensor], layer: str, core: str, rank: int) -> State:
    own = {}
    for kind in ("weight", *(("bias",) if shape.qkv_bias else ())):
        parts = [state[f"{layer}.self_attn.{one}_proj.{kind}"] for one in "qkv"]
        grouped = [part.reshape(shape.groups, -1, *part.shape[1:]) for part in parts]
        fused = torch.cat(grouped, 1).reshape(-1, *parts[0].shape[1:])
        own[f"{core}.self_attention.linear_qkv.{kind}"] = fused.chunk(shape.tensor)[rank]
    output = state[f"{layer}.self_attn.o_proj.weight"]
    own[f"{core}.self_attention.linear_proj.weight"] = output.chunk(shape.tensor, 1)[rank]
    own[f"{core}.input_layernorm.weight"] = state[f"{layer}.input_layernorm.weight"]
    own[f"{core}.pre_mlp_layernorm.weight"] = state[f"{layer}.post_attention_layernorm.weight"]
    if shape.qk_norm:
        own |= {
            f"{core}.self_attention.{one}_layernorm.weight": state[f"{layer}.self_attn.{one}_norm.weight"]
            for one in "qk"
        }
    return own


def _feed_forward(
    shape: Shape, state: Mapping[str, torch.Tensor], layer: str, core: str, ranks: tuple[int, int]
) -> State:
    pieces, per = shape.tensor, max(1, shape.experts) // shape.expert
    if shape.experts and shape.expert_tensor:
        pieces = shape.expert_tensor
    rank = ranks[0] if pieces > 1 else 0
    own: State = {f"{core}.mlp.router.weight": state[router(shape, layer)]} if shape.experts else {}
    for number, (stem, names) in enumerate(feed_forward(shape, layer).items()):
        if number // per != ranks[1]:
            continue
        prefix = f"{core}.mlp.experts.local_experts.{number % per}" if shape.experts else f"{core}.mlp"
        gate, up, down = (state[f"{stem}{name}.weight"] for name in names)
        own[f"{prefix}.linear_fc1.weight"] = torch.cat([gate.chunk(pieces)[rank], up.chunk(pieces)[rank]])
        own[f"{prefix}.linear_fc2.weight"] = down.chunk(pieces, 1)[rank]
    return own


def with_engine(state: State) -> State:
    """The names of Transformer Engine's modules, with its extra states, and its grouped experts."""
    renamed: State = {}
    for name, tensor in state.items():
        for apart, fused in ENGINE.items():
            name = name.replace(apart, fused)
        name = re.sub(r"experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight$", r"experts.\2.weight\1", name)
        renamed[name] = tensor
    return renamed


def with_grouped_experts(state: State) -> State:
    """The experts of a rank in two matrices, as `GroupedMLP` of Megatron core keeps them."""
    kept = {name: tensor for name, tensor in state.items() if ".local_experts." not in name}
    stems = {name.partition(".local_experts.")[0] for name in state if ".local_experts." in name}
    for stem in stems:
        for number in (1, 2):
            found = [
                tensor.T
                for name, tensor in state.items()
                if name.startswith(f"{stem}.") and name.endswith(f"fc{number}.weight")
            ]
            whole = torch.stack(found)
            hidden = whole.shape[number]
            kept[f"{stem}.weight{number}"] = whole.reshape((hidden, -1) if number == 1 else (-1, hidden)).contiguous()
    return kept


def with_old_names(state: State) -> dict[str, Any]:
    """The nested dict of Megatron-LM before its core."""
    encoder, model = {}, dict[str, Any]()
    for name, tensor in state.items():
        if name == "embedding.word_embeddings.weight":
            model["embedding"] = {"word_embeddings": {"weight": tensor}}
        elif name == "output_layer.weight":
            model["output_layer"] = {"weight": tensor}
        else:
            for core, old in OLD.items():
                name = name.replace(core, old)
            encoder[name.removeprefix("decoder.")] = tensor
    return {"language_model": {**model, "encoder": encoder}}


def save_megatron(
    folder: Path,
    shape: Shape,
    state: Mapping[str, torch.Tensor],
    names: Any = lambda own: own,
    version: float = 3.0,
    **changes: Any,
) -> Path:
    """A run with one save, `iter_0000007`.

    Args:
        folder: is made.
        shape: of the model and its grid.
        state: from `hugging_face_state`.
        names: renames the tensors of a rank.
        version: `checkpoint_version`.
        changes: arguments of the run.
    """
    place = folder / "iter_0000007"
    for tensor in range(shape.tensor):
        for pipeline in range(shape.pipeline):
            for expert in range(shape.expert):
                stages = [
                    names(rank_state(shape, state, (tensor, pipeline, expert, stage))) for stage in range(shape.virtual)
                ]
                keys = ["model"] if shape.virtual == 1 else [f"model{stage}" for stage in range(shape.virtual)]
                content = {"args": shape.arguments(**changes), "checkpoint_version": version, "iteration": 7}
                name = f"mp_rank_{tensor:02d}" + (f"_{pipeline:03d}" if shape.pipeline > 1 else "")
                home = place / (name + (f"_{expert:03d}" if shape.expert > 1 else ""))
                home.mkdir(parents=True)
                torch.save({**content, **dict(zip(keys, stages, strict=True))}, home / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("7")
    return folder
