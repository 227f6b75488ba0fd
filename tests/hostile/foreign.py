"""Adapters of other programs than PEFT for merge-lora: mlx-lm, torchtune, LitGPT, MindFormers, LLaMA2-Accessory."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.hostile.adapters import ATTACK, HUGE, LONG, ON, base, evil
from tests.hostile.case import Case
from tests.hostile.honest import members, mindspore_value, repacked, safetensors, save
from tests.hostile.pickles import PYTHON, SHELL, call, text

Change = Callable[[bytes], bytes]

MLX_CONFIG: dict[str, Any] = {"fine_tune_type": "lora", "lora_parameters": {"rank": 2, "scale": 4.0}}
TUNE_CONFIG: dict[str, Any] = {"r": 2, "lora_alpha": 4, "peft_type": "LORA"}
MODULE = "model.layers.0.self_attn.q_proj"
LIT_CONFIG = (
    "{name: Llama-2-x, n_layer: 1, n_embd: 4, n_head: 2, n_query_groups: 2, padded_vocab_size: 8, vocab_size: 8, "
    "intermediate_size: 6, bias: false, parallel_residual: false, rotary_percentage: 1.0, norm_class_name: RMSNorm, "
    "mlp_class_name: LLaMAMLP}"
)
RUN = "model: {model_config: {num_layers: 1}, pet_config: {lora_rank: 2, lora_alpha: 4}}"


def case(write: Callable[[Path], Path], refused: str | None, config: Mapping[str, Any] | None = None) -> Case:
    """An adapter that `write` makes in the sub-folder `adapter`, and the base with this config."""

    def build(folder: Path) -> Path:
        base(folder, **(config or {}))
        (folder / "adapter").mkdir()
        return write(folder / "adapter")

    return Case(build, refused, ON, "merge-lora")


def mlx(refused: str | None, settings: Any = None, arrays: Mapping[str, Any] | None = None, **config: Any) -> Case:
    """An adapter of mlx-lm with more settings, or with this text for them, and more arrays."""

    def write(path: Path) -> Path:
        written = settings if isinstance(settings, str) else json.dumps({**MLX_CONFIG, **(settings or {})})
        (path / "adapter_config.json").write_text(written)
        header: dict[str, Any] = {"__metadata__": None}
        data, ones = b"", np.ones
        for name, array in {
            f"{MODULE}.lora_a": ones((4, 2), "f4"),
            f"{MODULE}.lora_b": ones((2, 4), "f4"),
            **{name: array.astype("f4") for name, array in (arrays or {}).items()},
        }.items():
            end = len(data) + array.nbytes
            header[name] = {"dtype": "F32", "shape": list(array.shape), "data_offsets": [len(data), end]}
            data += array.tobytes()
        (path / "adapters.safetensors").write_bytes(safetensors(header, data))
        return path

    return case(write, refused, config)


def tune(
    refused: str | None,
    settings: Any = None,
    state: Mapping[Any, Any] | None = None,
    change: Change = bytes,
    name: str = "adapter_model.pt",
    **config: Any,
) -> Case:
    """An adapter of torchtune with more settings, or with this text for them, and more tensors."""

    def write(path: Path) -> Path:
        written = settings if isinstance(settings, str) else json.dumps({**TUNE_CONFIG, **(settings or {})})
        (path / "adapter_config.json").write_text(written)
        pair = {"layers.0.attn.q_proj.lora_a.weight": torch.ones(2, 4)}
        parts = members({**pair, "layers.0.attn.q_proj.lora_b.weight": torch.ones(4, 2), **(state or {})})
        repacked(path, {**parts, "x/data.pkl": change(parts["x/data.pkl"])}, name)
        return path

    return case(write, refused, config)


def lit(
    refused: str | None,
    settings: str = "{lora_r: 2, lora_alpha: 4}",
    model: str = LIT_CONFIG,
    state: Mapping[Any, Any] | None = None,
    change: Change = bytes,
    **config: Any,
) -> Case:
    """An adapter of LitGPT with these settings, and more tensors."""

    def write(path: Path) -> Path:
        (path / "hyperparameters.yaml").write_text(settings)
        (path / "model_config.yaml").write_text(model)
        qkv = "transformer.h.0.attn.qkv"
        pair = {f"{qkv}.lora_A": torch.ones(4, 4), f"{qkv}.lora_B": torch.ones(8, 2)}
        parts = members({"model": {**pair, **(state or {})}})
        repacked(path, {**parts, "x/data.pkl": change(parts["x/data.pkl"])}, "lit_model.pth.lora")
        return path

    return case(write, refused, config)


def mind(refused: str | None, more: Mapping[str, Any] | None = None, run: str = RUN, cut: int | None = None) -> Case:
    """LoRA pairs of MindFormers next to the YAML of the run, with more arrays."""

    def write(path: Path) -> Path:
        module, ones = "model.layers.0.attention.wq.mindpet_delta_lora", np.ones
        pairs = {f"{module}_a": ones((2, 4), "f4"), f"{module}_b": ones((4, 2), "f4"), **(more or {})}
        data = b"".join(mindspore_value(name, array) for name, array in pairs.items())
        (path / "x.ckpt").write_bytes(data[:cut])
        (path / "run.yaml").write_text(run)
        return path

    return case(write, refused)


def shards(refused: str | None, state: Mapping[Any, Any] | None = None, change: Change = bytes, meta: str = "") -> Case:
    """Trained parameters of Accessory, with more tensors."""

    def write(path: Path) -> Path:
        query = "llma.layers.0.attention.wq"
        pair = {f"{query}.lora_a.weight": torch.ones(2, 4), f"{query}.lora_b.weight": torch.ones(4, 2)}
        parts = members({"model": {**pair, **(state or {})}})
        repacked(path, {**parts, "x/data.pkl": change(parts["x/data.pkl"])}, "consolidated.00-of-01.model.pth")
        if meta:
            (path / "meta.json").write_text(meta)
        return path

    return case(write, refused)


def plain(path: Path) -> Path:
    """A torch file that is not a state dict, under torchtune's name."""
    save(path, [1, 2], "adapter_0.pt")
    return path


def pipe(path: Path) -> Path:
    """A pipe under torchtune's name."""
    os.mkfifo(path / "adapter_0.pt")
    return path


def value(opcodes: bytes) -> Change:
    """One more value in a pickle."""
    return evil(opcodes)


SYSTEM, EVAL = value(call("os", "system", text(SHELL))), value(call("builtins", "eval", text(PYTHON)))
ODD = "the adapter config (?:has|is invalid)"
QUERY = "layers.0.attn.q_proj"
HONEST = {"mlx": mlx(None), "torchtune": tune(None), "litgpt": lit(None), "mindformers": mind(None)}
HONEST |= {"accessory": shards(None)}
CASES: dict[str, Case] = {
    **{f"honest: {name}": one for name, one in HONEST.items()},
    "mlx: settings 100,000 deep": mlx("not valid JSON", "[" * 100_000),
    "mlx: settings that are a list": mlx("not a JSON object", "[]"),
    "mlx: no parameters": mlx(ODD, {"lora_parameters": 7}),
    "mlx: scale of 400 digits": mlx(ODD, {"lora_parameters": {"rank": 2, "scale": HUGE}}),
    "mlx: scale that is not a number": mlx(ODD, '{"lora_parameters": {"rank": 2, "scale": NaN}}'),
    "mlx: rank of 400 digits": mlx(ODD, {"lora_parameters": {"rank": HUGE, "scale": 1}}),
    "mlx: rank of another": mlx("rank", {"lora_parameters": {"rank": 3, "scale": 1}}),
    "mlx: alpha that is a text": mlx(ODD, {"lora_parameters": {"rank": 2, "scale": 1, "alpha": LONG}}),
    "mlx: another kind": mlx("fine_tune_type", {"fine_tune_type": "\x1b[2J" + LONG}),
    "mlx: keys that are no list": mlx(None, {"lora_parameters": {"rank": 2, "scale": 1.0, "keys": {"x": LONG}}}),
    "mlx: a name that leads out": mlx("unexpected keys", arrays={"../../evil": np.ones(2)}),
    "mlx: a name with an escape sequence": mlx("unprintable", arrays={"\x1b[2J\n": np.ones(2)}),
    "mlx: a module of 100,000 letters": mlx("too long tensor name", arrays={f"{LONG}.lora_a": np.ones((4, 2))}),
    "mlx: a scalar": mlx("shape", arrays={f"{MODULE}.lora_a": np.ones(())}),
    "mlx: of nothing": mlx("shape|truncated|safetensors", arrays={f"{MODULE}.lora_a": np.ones((4, 0))}),
    "mlx: four axes": mlx("shape", arrays={f"{MODULE}.lora_a": np.ones((4, 2, 1, 1))}),
    "mlx: experts of no known layer": mlx("experts", arrays={f"{MODULE}.lora_a": np.ones((4, 2, 2))}),
    "mlx: a million experts": mlx(
        "does not have|shape|lacks|experts",
        arrays={"model.layers.0.mlp.switch_mlp.up_proj.lora_a": np.ones((1 << 20, 1, 1))},
    ),
    "mlx: not finite": mlx("not finite", arrays={f"{MODULE}.lora_a": np.full((4, 2), np.nan)}),
    "mlx: whole weights of another shape": mlx(
        "no part|shape mismatch|does not have", {"fine_tune_type": "full"}, {"model.norm.weight": np.ones(9)}
    ),
    "mlx: whole weights of another kind of model": mlx("whole weights", {"fine_tune_type": "full"}, model_type="gpt2"),
    "torchtune: os.system": tune(ATTACK, change=SYSTEM),
    "torchtune: eval": tune(ATTACK, change=EVAL),
    "torchtune: another call": tune("not a plain state dict", change=value(call("evil", "Evil"))),
    "torchtune: a pickle after the pickle": tune("after its end", change=lambda data: data + b"cos\nsystem\n."),
    "torchtune: a list": case(plain, "not a plain state dict|not a torch file"),
    "torchtune: a pipe": case(pipe, "no adapter|not a PEFT adapter|not a regular file"),
    "torchtune: half a pair": tune("lacks B", state={"layers.0.attn.k_proj.lora_a.weight": torch.ones(2, 4)}),
    "torchtune: a view of 2^40": tune(
        "larger than its storage", state={f"{QUERY}.lora_a.weight": torch.ones(1).expand(2, 1 << 40)}
    ),
    "torchtune: a scalar": tune("no product", state={f"{QUERY}.lora_a.weight": torch.tensor(1.0)}),
    "torchtune: of nothing": tune("no product", state={f"{QUERY}.lora_a.weight": torch.ones(0, 4)}),
    "torchtune: whole numbers": tune("int64", state={f"{QUERY}.lora_a.weight": torch.ones(2, 4).long()}),
    "torchtune: a name that is a number": tune("does not have", state={7: torch.ones(2)}),
    "torchtune: a name that leads out": tune("does not have", state={"../../evil": torch.ones(2)}),
    "torchtune: 20,000 names": tune("does not have", state={f"x.{n}.lora_c": torch.ones(1) for n in range(20_000)}),
    "torchtune: alpha of 400 digits": tune(ODD, {"lora_alpha": HUGE}),
    "torchtune: alpha that is a list": tune(ODD, {"lora_alpha": [1]}),
    "torchtune: rank that is a text": tune(ODD, {"r": "2"}),
    "torchtune: heads of the base that do not add up": tune("do not match|sizes", num_attention_heads=3),
    "torchtune: heads of the base of 400 digits": tune("more than any model has", num_attention_heads=HUGE),
    "torchtune: a head of the base of 2^30": tune("more than any model has", head_dim=1 << 30),
    "torchtune: a base whose type is a list": tune("order of rows|model_type", model_type=["llama"]),
    "litgpt: os.system": lit(ATTACK, change=SYSTEM),
    "litgpt: eval": lit(ATTACK, change=EVAL),
    "litgpt: a list": lit("no state dict", change=lambda _: pickle.dumps([1], 2)),
    "litgpt: settings that build an object": lit("not valid YAML", "!!python/object/apply:os.system ['x']"),
    "litgpt: settings 100,000 deep": lit("not valid YAML|too large|deep", "[" * 100_000),
    "litgpt: alpha of 400 digits": lit(ODD, f"{{lora_r: 2, lora_alpha: {HUGE}}}"),
    "litgpt: alpha that is a list": lit(ODD, "{lora_r: 2, lora_alpha: [1]}"),
    "litgpt: nothing of the fused matrix": lit("rows", "{lora_r: 2, lora_alpha: 4, lora_query: 0, lora_value: 0}"),
    "litgpt: heads of 400 digits": lit("n_head", model=LIT_CONFIG.replace("n_head: 2", f"n_head: {HUGE}")),
    "litgpt: 2^30 experts": lit(
        "experts",
        model=LIT_CONFIG.replace("{", "{n_expert: 1073741824, ").replace("LLaMAMLP", "LLaMAMoE"),
        model_type="mixtral",
    ),
    "litgpt: a scalar": lit("rows", state={"transformer.h.0.attn.qkv.lora_A": torch.tensor(1.0)}),
    "litgpt: a name that leads out": lit("does not have", state={"../../evil": torch.ones(2)}),
    "mindformers: cut": mind("where 96 bytes are left", cut=-3),
    "mindformers: a run that builds an object": mind("lora_alpha", run="!!python/object/apply:os.system ['x']"),
    "mindformers: alpha of 400 digits": mind(ODD, run=RUN.replace("lora_alpha: 4", f"lora_alpha: {HUGE}")),
    "mindformers: alpha that is a list": mind(ODD, run=RUN.replace("lora_alpha: 4", "lora_alpha: [1]")),
    "mindformers: half a pair": mind("lacks B", {"model.layers.0.attention.wk.lora_a": np.ones((2, 4), "f4")}),
    "mindformers: a scalar": mind("no product", {"model.layers.0.attention.wk.lora_a": np.ones((), "f4"),
                                  "model.layers.0.attention.wk.lora_b": np.ones((), "f4")}),
    "mindformers: a module that is not there": mind(
        "does not have", {f"model.layers.0.{LONG[:300]}.lora_{one}": np.ones((2, 2), "f4") for one in "ab"}
    ),
    "mindformers: another tensor that leads out": mind("does not have", {"model.../../evil": np.ones(2, "f4")}),
    "accessory: os.system": shards(ATTACK, change=SYSTEM),
    "accessory: eval": shards(ATTACK, change=EVAL),
    "accessory: a list": shards("state dict|no tensors|holds", change=lambda _: pickle.dumps([1], 2)),
    "accessory: half a pair": shards("lacks B", {"llma.layers.0.attention.wk.lora_a.weight": torch.ones(2, 4)}),
    "accessory: a scalar": shards("no product|join", {"llma.layers.0.attention.wq.lora_a.weight": torch.tensor(1.0)}),
    "accessory: a bias of another size": shards(
        "shape|fit|heads", {f"llma.layers.0.attention.w{one}.bias": torch.ones(7) for one in "qkvo"}
    ),
    "accessory: a name that leads out": shards("does not have", {"llma.../../evil": torch.ones(2)}),
    "accessory: meta 100,000 deep": shards("not valid JSON", meta="[" * 100_000),
    "accessory: another plugin": shards("plugin", meta='{"llama_type": "../../evil"}'),
}  # fmt: skip
