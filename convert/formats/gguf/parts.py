"""Tensors that a GGUF file and a Hugging Face folder divide differently: experts, and keys with values of latents.

Sources: llama.cpp `conversion/gpt_oss.py` and `deepseek.py`, transformers `modeling_gpt_oss.py` and
`modeling_deepseek_v3.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from llmconv.convert.algebra import concat, reshaped, slice_rows
from llmconv.convert.formats.gguf.configs import HINT, Keys
from llmconv.errors import MalformedInput, UnsupportedInput
from llmconv.files.safetensors_file import FileTensor
from llmconv.tensors import BY_NAME, Array, LazyTensor, cast

LAYER = "model.layers.{}."
NUMBER = r"(0|[1-9]\d{0,8})"
JOINED = re.compile(rf"blk\.{NUMBER}\.ffn_(gate|down|up)_exps\.(weight|bias)")
MATRICES = 1 << 17  # of all experts; the largest models have half as many


class Parts(Protocol):
    """What is divided differently in the files of some architectures.

    Each function takes its tensors out of those of one side, and returns those of the other. They raise MalformedInput
    or ValueError where tensors are missing or do not fit together.
    """

    @property
    def turned(self) -> re.Pattern[str] | None:
        """Names in the file whose rows are not rows of the model, so that codes cannot be kept; None for none."""

    def read(self, keys: Keys, tensors: dict[str, LazyTensor], config: Mapping[str, Any]) -> dict[str, LazyTensor]: ...

    def write(self, tensors: dict[str, LazyTensor], config: Mapping[str, Any]) -> dict[str, LazyTensor]: ...


def _experts(config: Mapping[str, Any]) -> int:
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    return next((int(config[name]) for name in names if config.get(name)), 0)


def _joined(
    keys: Keys, tensors: dict[str, LazyTensor], count: int, kinds: str
) -> dict[tuple[str, str, str], LazyTensor]:
    """Takes out the tensors of all experts, by layer, part and kind; those of `count` experts each."""
    names = [match for name in tensors if (match := JOINED.fullmatch(name)) and match[3] in kinds.split()]
    if len(names) * count > MATRICES:
        raise MalformedInput(f"`{keys.source}` declares {count} experts, more than any model has", hint=HINT)
    found = {(match[1], match[2], match[3]): tensors.pop(match[0]) for match in names}
    for (layer, part, kind), one in found.items():
        if len(one.shape) != (3 if kind == "weight" else 2) or one.num_rows != count:
            name = f"blk.{layer}.ffn_{part}_exps.{kind}"
            raise MalformedInput(f"`{name}` of `{keys.source}` is not {count} experts", hint=HINT)
    return found


@dataclass(frozen=True)
class Experts:
    """The matrices of all experts of a layer, [experts, rows, columns], in place of one for each."""

    pattern: str  # the name of a matrix in its layer, with `{}` for the number of the expert and the part
    names: Mapping[str, str]  # of the parts, by llama.cpp's
    turned: re.Pattern[str] | None = None

    def read(self, keys: Keys, tensors: dict[str, LazyTensor], config: Mapping[str, Any]) -> dict[str, LazyTensor]:
        if not (count := _experts(config)):
            return {}
        found: dict[str, LazyTensor] = {}
        for (layer, part, _), joined in _joined(keys, tensors, count, "weight").items():
            for expert in range(count):
                found[LAYER.format(layer) + self.pattern.format(expert, self.names[part])] = _one(joined, expert)
        return found

    def write(self, tensors: dict[str, LazyTensor], config: Mapping[str, Any]) -> dict[str, LazyTensor]:
        sign = re.compile(r"model\.layers\.(\d+)\." + re.escape(self.pattern).replace(r"\{\}", r"(\w+)"))
        ours = {name: part for part, name in self.names.items()}
        found: dict[str, list[LazyTensor]] = {}
        for match in [match for name in tensors if (match := sign.fullmatch(name))]:
            layer, expert, part = match.groups()
            one = tensors.pop(match[0])
            row = found.setdefault(f"blk.{layer}.ffn_{ours[part]}_exps.weight", [])
            if int(expert) != len(row):
                raise UnsupportedInput(f"`{match[0]}` is not after the expert before it", hint="save the model again")
            row.append(reshaped(one, (1, *one.shape)))
        return {name: concat(row, 0) for name, row in found.items()}


def _one(joined: LazyTensor, number: int) -> LazyTensor:
    """The matrix of one expert of [experts, rows, columns]; where those lie in a file, a range of it."""
    shape = joined.shape[1:]
    if isinstance(joined, FileTensor):
        size = joined.nbytes // joined.num_rows
        return FileTensor(joined.path, joined.offset + number * size, joined.dtype, shape, joined.record)
    return reshaped(slice_rows(joined, number, number + 1), shape)


@dataclass(frozen=True)
class AlternatingExperts:
    """GPT-OSS: matrices [experts, out, in] and biases [experts, out] of gate, up and down.

    transformers has them turned, [experts, in, out], and gate and up as the even and odd columns of one.
    """

    turned: re.Pattern[str] | None = JOINED

    def read(self, keys: Keys, tensors: dict[str, LazyTensor], config: Mapping[str, Any]) -> dict[str, LazyTensor]:
        joined = _joined(keys, tensors, _experts(config), "weight bias")
        found: dict[str, LazyTensor] = {}
        for layer, kind in dict.fromkeys((layer, kind) for layer, _, kind in joined):
            parts = [joined.get((layer, part, kind)) for part in ("gate", "up", "down")]
            gate, up, down = parts
            if gate is None or up is None or down is None:
                raise MalformedInput(f"`{keys.source}` lacks a part of the experts of layer {layer}", hint=HINT)
            name, end = LAYER.format(layer) + "mlp.experts.", "" if kind == "weight" else "_bias"
            found[f"{name}gate_up_proj{end}"] = _swapped(_alternating(gate, up))
            found[f"{name}down_proj{end}"] = _swapped(down)
        return found

    def write(self, tensors: dict[str, LazyTensor], config: Mapping[str, Any]) -> dict[str, LazyTensor]:
        sign = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up_proj|down_proj)(_bias)?")
        found: dict[str, LazyTensor] = {}
        for match in [match for name in tensors if (match := sign.fullmatch(name))]:
            name, kind = f"blk.{match[1]}.ffn_{{}}_exps.", "bias" if match[3] else "weight"
            one = _swapped(tensors.pop(match[0]))
            if match[2] == "down_proj":
                found[name.format("down") + kind] = one
            else:
                for first, part in enumerate(("gate", "up")):
                    found[name.format(part) + kind] = _every_other(one, first)
        return found


def _swapped(tensor: LazyTensor) -> LazyTensor:
    """Matrices [experts, rows, columns] transposed; biases [experts, rows] as they are."""
    if len(tensor.shape) != 3:
        return tensor
    shape = (tensor.shape[0], tensor.shape[2], tensor.shape[1])
    return LazyTensor(
        tensor.dtype, shape, lambda start, stop: np.ascontiguousarray(tensor.rows(start, stop).swapaxes(1, 2))
    )


def _alternating(one: LazyTensor, other: LazyTensor) -> LazyTensor:
    """Two of [experts, rows, ...] as one of [experts, 2 x rows, ...], their rows in turn."""
    one, other = _alike(one, other)
    if one.shape != other.shape:
        raise ValueError(f"the shapes of gate and up are {list(one.shape)} and {list(other.shape)}")
    shape = (one.shape[0], 2 * one.shape[1], *one.shape[2:])

    def load(start: int, stop: int) -> Array:
        pairs = np.stack([one.rows(start, stop), other.rows(start, stop)], axis=2)
        return pairs.reshape(stop - start, *shape[1:])

    return LazyTensor(one.dtype, shape, load)


def _every_other(tensor: LazyTensor, first: int) -> LazyTensor:
    """Rows `first`, `first + 2`, … of each expert, of [experts, rows, ...]."""
    if len(tensor.shape) < 2 or tensor.shape[1] % 2:
        raise ValueError(f"gate and up have the shape {list(tensor.shape)}")
    shape = (tensor.shape[0], tensor.shape[1] // 2, *tensor.shape[2:])
    return LazyTensor(
        tensor.dtype, shape, lambda start, stop: np.ascontiguousarray(tensor.rows(start, stop)[:, first::2])
    )


def _alike(one: LazyTensor, other: LazyTensor) -> tuple[LazyTensor, LazyTensor]:
    """Two tensors of one element type: that of both, or float32, which holds the values of smaller ones."""
    if one.dtype != other.dtype:
        one, other = (cast(each, BY_NAME["float32"]) for each in (one, other))
    if one.dtype != other.dtype:
        raise ValueError(f"element types {one.dtype.name} and {other.dtype.name}")
    return one, other


@dataclass(frozen=True)
class Latent:
    """DeepSeek: `kv_b_proj`, [heads x (key + value), rank], as keys [heads, rank, key] and values [heads, value, rank].

    Key is the part of a key that does not turn. Older files have it whole.
    """

    turned: re.Pattern[str] | None = re.compile(r"blk\.\d+\.attn_[kv]_b\.weight")

    def read(self, keys: Keys, tensors: dict[str, LazyTensor], config: Mapping[str, Any]) -> dict[str, LazyTensor]:
        found: dict[str, LazyTensor] = {}
        heads, rank, key, value = _latent_sizes(config)
        for match in [m for name in tensors if (m := re.fullmatch(rf"blk\.{NUMBER}\.attn_k_b\.weight", name))]:
            name = match[0].replace("attn_k_b", "attn_v_b")
            if name not in tensors:
                raise MalformedInput(f"`{keys.source}` has `{match[0]}` without `{name}`", hint=HINT)
            one, other = _alike(tensors.pop(match[0]), tensors.pop(name))
            if (one.shape, other.shape) != ((heads, rank, key), (heads, value, rank)):
                raise ValueError(f"`{match[0]}` and `{name}` have the shapes {list(one.shape)} and {list(other.shape)}")
            whole = _side_by_side(_swapped(one), other)
            found[f"{LAYER.format(match[1])}self_attn.kv_b_proj.weight"] = reshaped(
                whole, (heads * (key + value), rank)
            )
        return found

    def write(self, tensors: dict[str, LazyTensor], config: Mapping[str, Any]) -> dict[str, LazyTensor]:
        found: dict[str, LazyTensor] = {}
        heads, rank, key, value = _latent_sizes(config)
        sign = re.compile(r"model\.layers\.(\d+)\.self_attn\.kv_b_proj\.weight")
        for match in [match for name in tensors if (match := sign.fullmatch(name))]:
            one = tensors.pop(match[0])
            if one.shape != (heads * (key + value), rank):
                raise ValueError(f"`{match[0]}` has the shape {list(one.shape)}")
            whole = reshaped(one, (heads, key + value, rank))
            found[f"blk.{match[1]}.attn_k_b.weight"] = _swapped(_middle(whole, 0, key))
            found[f"blk.{match[1]}.attn_v_b.weight"] = _middle(whole, key, key + value)
        return found


def _latent_sizes(config: Mapping[str, Any]) -> tuple[int, int, int, int]:
    names = ("num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim")
    heads, rank, key, value = (int(config[name]) for name in names)
    return heads, rank, key, value


def _side_by_side(one: LazyTensor, other: LazyTensor) -> LazyTensor:
    """[heads, a, columns] and [heads, b, columns] as [heads, a + b, columns]."""
    shape = (one.shape[0], one.shape[1] + other.shape[1], one.shape[2])
    return LazyTensor(
        one.dtype,
        shape,
        lambda start, stop: np.concatenate([one.rows(start, stop), other.rows(start, stop)], axis=1),
    )


def _middle(tensor: LazyTensor, first: int, last: int) -> LazyTensor:
    """[heads, `first:last`, columns] of [heads, rows, columns]."""
    shape = (tensor.shape[0], last - first, tensor.shape[2])
    return LazyTensor(
        tensor.dtype, shape, lambda start, stop: np.ascontiguousarray(tensor.rows(start, stop)[:, first:last])
    )
