"""Baichuan-13B and ChatGLM-6B in a few lines: code with the tensor names of the published models, and their formulas.

Written for the tests from the papers' formulas; the names and shapes are those of the published checkpoints.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

State = Mapping[str, Tensor]

BAICHUAN: dict[str, Any] = {
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-6,
}
CHATGLM: dict[str, Any] = {
    "vocab_size": 24,
    "hidden_size": 16,
    "num_layers": 2,
    "num_attention_heads": 2,
    "inner_hidden_size": 64,
    "layernorm_epsilon": 1e-5,
    "max_sequence_length": 64,
}
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])

CONFIG_CODE = """
from transformers import PreTrainedConfig


class {name}Config(PreTrainedConfig):
    model_type = "{kind}"

    def __init__(self, {sizes}, **others):
        {assigned}
        super().__init__(**others)
"""

BAICHUAN_CODE = """
import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from .configuration import BaichuanConfig


class Norm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x):
        return x * (x.pow(2).mean(-1, keepdim=True) + self.eps).rsqrt() * self.weight


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads = config.num_attention_heads
        self.W_pack = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x):
        rows, length, width = x.shape
        q, k, v = (p.view(rows, length, self.heads, -1).transpose(1, 2) for p in self.W_pack(x).chunk(3, -1))
        place = torch.arange(length)
        slopes = 2.0 ** (-8.0 / self.heads * torch.arange(1, self.heads + 1))
        bias = slopes[:, None, None] * (place - place[:, None])
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5 + bias
        scores = scores.masked_fill(place > place[:, None], float("-inf"))
        return self.o_proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(rows, length, width))


class Mlp(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.self_attn, self.mlp = Attention(config), Mlp(config)
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x):
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Inner(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)


class BaichuanForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = BaichuanConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = Inner(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids, attention_mask=None, **others):
        x = self.model.embed_tokens(input_ids)
        for layer in self.model.layers:
            x = layer(x)
        return CausalLMOutputWithPast(logits=self.lm_head(self.model.norm(x)))
"""

CHATGLM_CODE = """
import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from .configuration import ChatglmConfig


class Rotary(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.register_buffer("inv_freq", (1.0 / 10000 ** (torch.arange(0, size, 2).float() / size)).half())

    def forward(self, x, place):
        angles = torch.cat([place[:, None] * self.inv_freq.float()] * 2, -1)[:, None]
        one, two = x.chunk(2, -1)
        return x * angles.cos() + torch.cat([-two, one], -1) * angles.sin()


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads, self.size = config.num_attention_heads, config.hidden_size // config.num_attention_heads
        self.rotary_emb = Rotary(self.size // 2)
        self.query_key_value = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x, places):
        rows, length, width = x.shape
        q, k, v = self.query_key_value(x).view(rows, length, self.heads, 3 * self.size).chunk(3, -1)
        q, k = (
            torch.cat([self.rotary_emb(p, place) for p, place in zip(each.chunk(2, -1), places)], -1) for each in (q, k)
        )
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        scores = q @ k.transpose(-1, -2) / self.size**0.5
        scores = scores.masked_fill(torch.ones(length, length).triu(1) > 0, float("-inf"))
        return self.dense((scores.softmax(-1) @ v).transpose(1, 2).reshape(rows, length, width))


class Mlp(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.dense_h_to_4h = nn.Linear(config.hidden_size, config.inner_hidden_size)
        self.dense_4h_to_h = nn.Linear(config.inner_hidden_size, config.hidden_size)

    def forward(self, x):
        return self.dense_4h_to_h(nn.functional.gelu(self.dense_h_to_4h(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.alpha = (2 * config.num_layers) ** 0.5
        self.attention, self.mlp = Attention(config), Mlp(config)
        self.input_layernorm = nn.LayerNorm(config.hidden_size, config.layernorm_epsilon)
        self.post_attention_layernorm = nn.LayerNorm(config.hidden_size, config.layernorm_epsilon)

    def forward(self, x, places):
        x = self.input_layernorm(x)
        x = self.post_attention_layernorm(self.alpha * x + self.attention(x, places))
        return self.alpha * x + self.mlp(x)


class Inner(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.final_layernorm = nn.LayerNorm(config.hidden_size, config.layernorm_epsilon)


class ChatglmForConditionalGeneration(PreTrainedModel, GenerationMixin):
    config_class = ChatglmConfig

    def __init__(self, config):
        super().__init__(config)
        self.transformer = Inner(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids, attention_mask=None, **others):
        place = torch.arange(input_ids.shape[1])
        x = self.transformer.word_embeddings(input_ids)
        for layer in self.transformer.layers:
            x = layer(x, (place, place // 2))
        return CausalLMOutputWithPast(logits=self.lm_head(self.transformer.final_layernorm(x)))
"""


def save_baichuan(folder: Path) -> Path:
    """The code of Baichuan-13B with its `config.json`, of other sizes than any checkpoint of the tests."""
    maps = {"AutoConfig": "configuration.BaichuanConfig", "AutoModelForCausalLM": "modeling.BaichuanForCausalLM"}
    return _saved(folder, "baichuan", BAICHUAN, BAICHUAN_CODE, maps)


def save_chatglm(folder: Path) -> Path:
    """The code of ChatGLM-6B, whose `auto_map` has no `AutoModelForCausalLM`, as the published one."""
    name = "modeling.ChatglmForConditionalGeneration"
    maps = {"AutoConfig": "configuration.ChatglmConfig", "AutoModel": name, "AutoModelForSeq2SeqLM": name}
    return _saved(folder, "chatglm", CHATGLM, CHATGLM_CODE, maps)


def _saved(folder: Path, kind: str, sizes: dict[str, Any], code: str, maps: dict[str, str]) -> Path:
    folder.mkdir()
    parts = {"kind": kind, "name": kind.title(), "sizes": ", ".join(sizes)}
    parts["assigned"] = "; ".join(f"self.{name} = {name}" for name in sizes)
    (folder / "configuration.py").write_text(CONFIG_CODE.format(**parts))
    (folder / "modeling.py").write_text(code)
    config = {"model_type": kind, "auto_map": maps, **sizes, "vocab_size": 999, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def baichuan_logits(state: State, ids: Tensor = IDS) -> Tensor:
    """Logits of a Llama with ALiBi (arXiv 2108.12409), from tensors in Llama's names, of `BAICHUAN`'s sizes."""
    heads, eps, length = BAICHUAN["num_attention_heads"], BAICHUAN["rms_norm_eps"], ids.shape[1]
    hidden = state["model.embed_tokens.weight"][ids]

    def norm(values: Tensor, name: str) -> Tensor:
        return functional.rms_norm(values, values.shape[-1:], state[name], eps)

    for layer in (f"model.layers.{number}." for number in range(BAICHUAN["num_hidden_layers"])):
        x = norm(hidden, f"{layer}input_layernorm.weight")
        outputs = []
        sizes = [slice(head * x.shape[-1] // heads, (head + 1) * x.shape[-1] // heads) for head in range(heads)]
        for head, part in enumerate(sizes):
            q, k, v = (x @ state[f"{layer}self_attn.{one}_proj.weight"][part].T for one in "qkv")
            scores = q @ k.mT / math.sqrt(q.shape[-1]) + 2 ** (-8 * (head + 1) / heads) * torch.arange(length)
            outputs.append(scores.masked_fill(torch.ones(length, length).triu(1) > 0, -math.inf).softmax(-1) @ v)
        hidden = hidden + torch.cat(outputs, -1) @ state[f"{layer}self_attn.o_proj.weight"].T
        x = norm(hidden, f"{layer}post_attention_layernorm.weight")
        gate, up = (x @ state[f"{layer}mlp.{one}_proj.weight"].T for one in ("gate", "up"))
        hidden = hidden + (functional.silu(gate) * up) @ state[f"{layer}mlp.down_proj.weight"].T
    return norm(hidden, "model.norm.weight") @ state["lm_head.weight"].T


def llama_state() -> dict[str, Tensor]:
    """Random tensors of a Llama without grouped heads, of `BAICHUAN`'s sizes."""
    torch.manual_seed(0)
    width, inner, rows = BAICHUAN["hidden_size"], BAICHUAN["intermediate_size"], BAICHUAN["vocab_size"]
    state = {"model.embed_tokens.weight": torch.randn(rows, width), "model.norm.weight": torch.rand(width) + 0.5}
    for layer in (f"model.layers.{number}." for number in range(BAICHUAN["num_hidden_layers"])):
        state |= {f"{layer}self_attn.{one}_proj.weight": torch.randn(width, width) for one in "qkvo"}
        state |= {f"{layer}mlp.{one}_proj.weight": torch.randn(inner, width) for one in ("gate", "up")}
        state[f"{layer}mlp.down_proj.weight"] = torch.randn(width, inner)
        state |= {f"{layer}{one}_layernorm.weight": torch.rand(width) + 0.5 for one in ("input", "post_attention")}
    return state | {"lm_head.weight": torch.randn(rows, width)}
