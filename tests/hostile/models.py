"""Hugging Face folders for from-hf, and MPT runs of Composer: settings of wrong kinds, sizes and names that lie."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.builders.mpt_models import CONFIG as FOUNDRY
from tests.builders.mpt_models import random_state
from tests.hostile.adapters import base
from tests.hostile.case import Case
from tests.hostile.configs import nested
from tests.hostile.files import instead_of
from tests.hostile.honest import composer, safetensors, save

HUGE = 10**400
LONG = "a" * 100_000
TARGETS = ("meta", "paddle", "mindformers", "accessory")
WRONG = "is `|is |has |have the type|names|sizes|cannot|needs|divide|does not|number|hold|which|are |gives|lacks"


def model(
    refused: str | None,
    to: str = "paddle",
    change: Callable[[Path], object] | None = None,
    shards: int = 1,
    **config: Any,
) -> Case:
    """A folder with other settings, after something was done to it."""

    def build(folder: Path) -> Path:
        base(folder, **{"max_position_embeddings": 32, "rms_norm_eps": 1e-6, **config})
        if change:
            change(folder / "base")
        return folder / "base"

    return Case(build, refused, {"to": to, "shards": shards}, "from-hf")


def everywhere(name: str, refused: str | None, **config: Any) -> dict[str, Case]:
    """The same folder for every format that has a way back."""
    return {f"{name}, to {to}": model(refused, to, **config) for to in TARGETS}


def text(content: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "config.json").write_text(content)


def weights(header: dict[str, Any] | bytes, data: bytes = bytes(64)) -> Callable[[Path], object]:
    return lambda folder: (folder / "model.safetensors").write_bytes(safetensors(header, data))


def shards(weight_map: Any) -> Callable[[Path], object]:
    return lambda folder: (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def mpt(refused: str | None, attention: Any = None, **fields: Any) -> Case:
    """A run of LLM Foundry with other settings."""

    def build(folder: Path) -> Path:
        written = {**FOUNDRY["attn_config"], **attention} if isinstance(attention, dict) else attention
        config = {**FOUNDRY, **({} if attention is None else {"attn_config": written}), **fields}
        content = composer({})
        content["state"]["model"] = {f"model.{name}": tensor for name, tensor in random_state(FOUNDRY).items()}
        content["state"]["integrations"]["huggingface"]["model"]["config"]["content"] = config
        return save(folder, content)

    return Case(build, refused)


def mpt_tensor(refused: str, name: str, tensor: torch.Tensor) -> Case:
    """A run of LLM Foundry with another tensor."""

    def build(folder: Path) -> Path:
        path = mpt(None).build(folder)
        content = torch.load(path)
        content["state"]["model"][name] = tensor
        return save(folder, content)

    return Case(build, refused)


ODD = "no usable|invalid|mismatch|has .* for|cannot express|impossible|is an MPT|of another shape|says|lacks|head"
HONEST = {f"to {to}": model(None, to) for to in TARGETS} | {"mpt": mpt(None)}
CASES: dict[str, Case] = {
    **{f"honest: {name}": case for name, case in HONEST.items()},
    **everywhere("a hidden size of 400 digits", WRONG, hidden_size=HUGE),
    **everywhere("a hidden size of a list", WRONG, hidden_size=[LONG]),
    **everywhere("no heads", WRONG, num_attention_heads=0),
    **everywhere("2^30 heads", WRONG, num_attention_heads=1 << 30),
    **everywhere("2^30 layers", WRONG, num_hidden_layers=1 << 30),
    **everywhere("2^40 layers", WRONG, num_hidden_layers=1 << 40),
    **everywhere("heads of 2^30 rows", WRONG, head_dim=1 << 30),
    **everywhere("a theta of 400 digits", WRONG, rope_theta=HUGE),
    **everywhere("a theta of a list", WRONG, rope_theta=[1]),
    **everywhere("rope settings of a text", WRONG, rope_scaling="evil"),
    **everywhere("rope settings of numbers", WRONG, rope_parameters=[1]),
    **everywhere("rope settings of nonsense", WRONG, rope_scaling={"rope_type": [], "factor": HUGE, "x": nested(300)}),
    **everywhere("a norm of 400 digits", WRONG, rms_norm_eps=HUGE),
    **everywhere("a model_type of a list", WRONG, model_type=["llama"]),
    **everywhere("a model_type that leads out", WRONG, model_type="../../evil"),
    **everywhere("an activation of a list", WRONG, hidden_act=[[LONG]]),
    **everywhere("biases of a list", None, pretraining_tp=[1]),
    "a window of a text": model(None, model_type="mistral", sliding_window="x" * 1000),
    "a text_config of a text": model(None, text_config="evil"),
    "tied by a list": model(None, tie_word_embeddings=[]),
    "quantized by a number": model("quantized", quantization_config=7),
    "kinds of layers of numbers": model(None, model_type="qwen2", use_sliding_window=True, layer_types=[1, [], None]),
    "an escape sequence for a type": model(WRONG, model_type="\x1b[2J\n"),
    "code": model(None, auto_map={"AutoModel": "evil.Evil"}),
    "architectures that are a number": model(None, architectures=7),
    "architectures of lists": model(None, architectures=[[], None, "\x1b[2J"]),
    "a version of a list": model(None, transformers_version=["5"]),
    "a version of 100,000 letters": model(None, transformers_version=LONG),
    "token ids of lists": model(None, bos_token_id=[[]], eos_token_id={}),
    "config: 100,000 deep": model("not valid JSON", change=text("[" * 100_000)),
    "config: a list": model("not a JSON object", change=text("[]")),
    "config: nothing": model("not valid JSON", change=text("")),
    "config: a pipe": model("no `config.json`", change=instead_of("config.json", lambda path: os.mkfifo(path))),
    "config: a link to /dev/zero": model(
        "no `config.json`", change=instead_of("config.json", lambda path: path.symlink_to("/dev/zero"))
    ),
    "weights: a pipe": model("no safetensors", change=instead_of("model.safetensors", lambda path: os.mkfifo(path))),
    "weights: a link to /etc/passwd": model(
        "safetensors", change=instead_of("model.safetensors", lambda path: path.symlink_to("/etc/passwd"))
    ),
    "weights: a link to itself": model(
        "no safetensors", change=instead_of("model.safetensors", lambda path: path.symlink_to(path.name))
    ),
    "weights: a header 100,000 deep": model("safetensors", change=weights(b"[" * 100_000)),
    "weights: a name that leads out": model(
        WRONG, change=weights({"../../evil": {"dtype": "F32", "shape": [16], "data_offsets": [0, 64]}})
    ),
    "weights: a layer of 5000 digits": model(
        WRONG,
        change=weights({f"model.layers.{'9' * 5000}.x": {"dtype": "F32", "shape": [16], "data_offsets": [0, 64]}}),
    ),
    "weights: a scalar for the embedding": model(
        WRONG,
        change=weights({"model.embed_tokens.weight": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}}, bytes(4)),
    ),
    "weights: nothing": model(WRONG, change=weights({}, b"")),
    "index: a shard outside": model("invalid shard name", change=shards({"a": "../x.safetensors"})),
    "index: an absolute shard": model("invalid shard name", change=shards({"a": "/etc/passwd"})),
    "index: a zero": model("is missing", change=shards({"a": "\0.safetensors"})),
    "index: a name of 60,000 letters": model("cannot be read|aaa", change=shards({"a": LONG + ".safetensors"})),
    "index: an escape sequence": model("is missing", change=shards({"a": "\x1b[2J\n.safetensors"})),
    "index: a list": model("no `weight_map`", change=shards([1])),
    "tokenizer: a link to a key": model(
        "leads out of the folder", change=lambda folder: (folder / "vocab.txt").symlink_to("/etc/hostname")
    ),
    "tokenizer.json 100,000 deep, to meta": model(
        None, "meta", lambda folder: (folder / "tokenizer.json").write_text("[" * 100_000)
    ),
    "tokenizer.json of nonsense, to meta": model(
        None,
        "meta",
        lambda folder: (folder / "tokenizer.json").write_text('{"model": {"type": "BPE", "vocab": [1], "merges": 7}}'),
    ),
    "generation_config of a list": model(
        None, change=lambda folder: (folder / "generation_config.json").write_text("[1]")
    ),
    "generation_config 100,000 deep": model(
        None, change=lambda folder: (folder / "generation_config.json").write_text("[" * 100_000)
    ),
    "mpt: a width of 100 digits": mpt(ODD, d_model=10**100, head_dim=8),
    "mpt: a width of a list": mpt(ODD, d_model=[1]),
    "mpt: a width of a fraction": mpt(ODD, d_model=24.5),
    "mpt: a width that is not a number": mpt(ODD, d_model=float("nan")),
    "mpt: a width without an end": mpt(ODD, d_model=float("inf")),
    "mpt: no heads": mpt(ODD, n_heads=0),
    "mpt: 2^60 layers": mpt(ODD, n_layers=1 << 60),
    "mpt: attention of a list": mpt(ODD, [1]),
    "mpt: attention of a text": mpt("aaa", LONG),
    "mpt: attention of another kind": mpt(ODD, {"attn_type": ["x"], "alibi_bias_max": [LONG]}),
    "mpt: a scale of 100 digits": mpt(ODD, {"softmax_scale": 10**100}),
    "mpt: clipped by a list": mpt(ODD, {"clip_qkv": [1]}),
    "mpt: options that are numbers": mpt(ODD, {7: 8}),
    "mpt: an option with an escape sequence": mpt(ODD, {"\x1b[2J\n": 1}),
    "mpt: 20,000 options": mpt(ODD, {f"x{number}": 1 for number in range(20_000)}),
    "mpt: a norm of a list": mpt(ODD, norm_type=[1]),
    "mpt: a norm that is not a number": mpt(ODD, norm_eps=float("nan")),
    "mpt: an MLP of a list": mpt(ODD, ffn_config=[1]),
    "mpt: an activation of lists": mpt(ODD, ffn_config={"ffn_type": [], "ffn_act_fn": [[]]}),
    "mpt: a layer of numbers": mpt(ODD, fc_type={"name": [1]}),
    "mpt: its old name and nonsense": mpt(ODD, 7, model_type="mosaic_gpt", mlp_ratio=[1], attn_qk_ln=[1]),
    "mpt: an embedding that is a scalar": mpt_tensor(
        "row|shape|has", "model.transformer.wte.weight", torch.tensor(1.0)
    ),
    "mpt: a matrix of three axes": mpt_tensor(
        "row|shape|has", "model.transformer.blocks.0.attn.Wqkv.weight", torch.zeros(2, 2, 2)
    ),
    "mpt: a name that leads out": mpt_tensor("row|shape|has|hold|does not have", "model.../../evil", torch.zeros(2)),
}
