"""Adapters for merge-lora, of PEFT and of PaddleNLP: pickles that call, settings that lie, patterns that never end."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.hostile.case import CANARY, Case
from tests.hostile.files import instead_of
from tests.hostile.honest import CONFIG, composer, members, repacked, safetensors, save, weights
from tests.hostile.pickles import PYTHON, SHELL, call, text

ATTACK = "nothing was run"
MODULE = "base_model.model.model.layers.0.self_attn.q_proj"
PADDLE = "llama.layers.0.self_attn.q_proj"
SETTINGS: dict[str, Any] = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
LORA_SETTINGS: dict[str, Any] = {"r": 2, "lora_alpha": 4, "rslora": False, "scaling": 2.0}
ON = {"base": Path("base")}
LONG = "a" * 100_000
HUGE = 10**400


def base(folder: Path, **config: Any) -> None:
    """The model that adapters are merged into, in the sub-folder `base`."""
    (folder / "base").mkdir()
    tensors, header, data = weights(), {}, b""
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": "F32",
            "shape": list(tensor.shape),
            "data_offsets": [len(data), len(data) + 4 * tensor.numel()],
        }
        data += tensor.numpy().tobytes()
    (folder / "base" / "model.safetensors").write_bytes(safetensors(header, data))
    (folder / "base" / "config.json").write_text(json.dumps({**CONFIG, **config}))


def factors() -> dict[str, torch.Tensor]:
    """A pair of factors for one module."""
    return {f"{MODULE}.lora_A.weight": torch.ones(2, 4), f"{MODULE}.lora_B.weight": torch.ones(4, 2)}


def adapter(
    refused: str | None, settings: Any = None, state: Any = None, config: Mapping[str, Any] | None = None
) -> Case:
    """An adapter of PEFT with more settings, or with this text for them, and more tensors."""

    def build(folder: Path) -> Path:
        base(folder, **(config or {}))
        (folder / "adapter").mkdir()
        written = settings if isinstance(settings, str) else json.dumps({**SETTINGS, **(settings or {})})
        (folder / "adapter" / "adapter_config.json").write_text(written)
        save(folder / "adapter", {**factors(), **(state or {})}, "adapter_model.bin")
        return folder / "adapter"

    return Case(build, refused, ON, "merge-lora")


def after(change: Callable[[Path], object], refused: str | None) -> Case:
    """An adapter of PEFT, after something was done to its folder."""

    def build(folder: Path) -> Path:
        path = adapter(None).build(folder)
        change(path)
        return path

    return Case(build, refused, ON, "merge-lora")


def pickled(change: Callable[[bytes], bytes], refused: str | None) -> Case:
    """An adapter whose pickle was changed."""

    def rewrite(path: Path) -> None:
        parts = members(factors())
        repacked(path, {**parts, "x/data.pkl": change(parts["x/data.pkl"])}, "adapter_model.bin")

    return after(rewrite, refused)


def more(value: bytes, refused: str | None) -> Case:
    """An adapter with one more value, made by these opcodes."""
    return pickled(lambda data: data[:-1] + text("evil") + value + b"s.", refused)


def instead(name: str, put: Callable[[Path], object], refused: str) -> Case:
    """An adapter in which something else stands for a file."""
    return after(instead_of(name, put), refused)


def header(fields: dict[str, Any] | bytes, data: bytes = bytes(64), refused: str = "safetensors|lacks|holds") -> Case:
    """An adapter of safetensors with this header."""
    return after(lambda path: (path / "adapter_model.safetensors").write_bytes(safetensors(fields, data)), refused)


def paddle(
    refused: str | None,
    settings: Any = None,
    arrays: Mapping[Any, Any] | None = None,
    config: Mapping[str, Any] | None = None,
    change: Callable[[bytes], bytes] = bytes,
    name: str = "lora_model_state.pdparams",
) -> Case:
    """An adapter of PaddleNLP with more settings, or with this text for them, and more arrays."""

    def build(folder: Path) -> Path:
        base(folder)
        path = folder / "adapter"
        path.mkdir()
        (path / "config.json").write_text(json.dumps({**CONFIG, **(config or {})}))
        written = settings if isinstance(settings, str) else json.dumps({**LORA_SETTINGS, **(settings or {})})
        (path / "lora_config.json").write_text(written)
        pair = {f"{PADDLE}.lora_A": np.ones((4, 2), "f4"), f"{PADDLE}.lora_B": np.ones((2, 4), "f4")}
        (path / name).write_bytes(change(pickle.dumps({**pair, **(arrays or {})}, 4)))
        return path

    return Case(build, refused, ON, "merge-lora")


def evil(value: bytes) -> Callable[[bytes], bytes]:
    """Adds a value made by these opcodes."""
    return lambda data: data[:-1] + text("evil") + value + b"s."


def run(refused: str | None, settings: Any = None, options: Mapping[str, Any] | None = None, **config: Any) -> Case:
    """A Composer run of PEFT with its base, with these settings of the adapter."""

    def build(folder: Path) -> Path:
        content = composer({}, config)
        names = {f"model.base_model.model.{name}": tensor for name, tensor in weights().items()}
        query = "model.base_model.model.model.layers.0.self_attn.q_proj"
        names[f"{query}.base_layer.weight"] = names.pop(f"{query}.weight")
        names |= {f"{query}.lora_{one}.default.weight": factors()[f"{MODULE}.lora_{one}.weight"] for one in "AB"}
        content["state"]["model"] = names
        written = {**SETTINGS, **settings} if isinstance(settings or {}, dict) and settings else settings or SETTINGS
        content["state"]["integrations"]["huggingface"]["model"]["peft_config"] = {"content": written}
        return save(folder, content)

    return Case(build, refused, options or {})


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


ODD = "the adapter config has|in the adapter config is invalid"
NO_FILE = (
    "not a torch file|not a regular file|no adapter weights|not a PEFT adapter|not of a training format|cannot be read"
)
SCALING = "scaling|has .* for|would merge nothing"
HONEST = {"peft": adapter(None), "paddle's": paddle(None), "run": run(None)}
HONEST |= {"split": run(None, options={"adapter": "split"})}
CASES: dict[str, Case] = {
    **{f"honest: {name}": case for name, case in HONEST.items()},
    "os.system": more(call("os", "system", text(SHELL)), ATTACK),
    "eval": more(call("builtins", "eval", text(PYTHON)), ATTACK),
    "another call": more(call("evil", "Evil", text(CANARY)), "not a plain state dict"),
    "a nested pickle": more(call("pickle", "loads", b"C\x04cos\n"), "not a plain state dict"),
    "a pickle after the pickle": pickled(lambda data: data + b"cos\nsystem\n.", "after its end"),
    "a list": pickled(lambda _: pickle.dumps([1], 2), "not a plain state dict"),
    "cut": after(lambda path: os.truncate(path / "adapter_model.bin", 300), "truncated|not a torch file"),
    "weights: a pipe": instead("adapter_model.bin", lambda path: os.mkfifo(path), NO_FILE),
    "weights: a link to /dev/zero": instead("adapter_model.bin", lambda path: path.symlink_to("/dev/zero"), NO_FILE),
    "weights: a link to /etc/passwd": instead(
        "adapter_model.bin", lambda path: path.symlink_to("/etc/passwd"), NO_FILE
    ),
    "weights: a link to itself": instead("adapter_model.bin", lambda path: path.symlink_to(path.name), NO_FILE),
    "weights: a folder": instead("adapter_model.bin", Path.mkdir, NO_FILE),
    "weights: nothing": instead("adapter_model.bin", Path.touch, NO_FILE),
    "settings: a pipe": instead("adapter_config.json", lambda path: os.mkfifo(path), NO_FILE),
    "settings: a link to /dev/zero": instead("adapter_config.json", lambda path: path.symlink_to("/dev/zero"), NO_FILE),
    "settings: 8 GB": after(lambda path: os.truncate(path / "adapter_config.json", 8 << 30), "too large"),
    "settings: 100,000 deep": adapter("not valid JSON", "[" * 100_000),
    "settings: a list": adapter("not a JSON object", "[]"),
    "settings: a number of 5000 digits": adapter("not valid JSON", '{"r": ' + "9" * 5000 + "}"),
    "settings: a field 900 deep": adapter("nested deeper than 100", {"layers_pattern": nested(900)}),
    "settings: another method": adapter("peft_type", {"peft_type": LONG}),
    "settings: an escape sequence": adapter("peft_type", {"peft_type": "\x1b[2J\nLORA"}),
    "settings: a field with an escape sequence": adapter(None, {"\x1b[2J\nx": 1}),
    "alpha: 400 digits": adapter(ODD, {"lora_alpha": HUGE}),
    "alpha: 1e308": adapter("not finite|too large|has values|overflow", {"lora_alpha": 1e308}),
    "alpha: not a number": adapter(ODD, '{"peft_type": "LORA", "r": 2, "lora_alpha": NaN}'),
    "alpha: infinite": adapter(ODD, '{"peft_type": "LORA", "r": 2, "lora_alpha": 1e999}'),
    "alpha: less than none": adapter(ODD, {"lora_alpha": -4}),
    "alpha: a text": adapter(ODD, {"lora_alpha": LONG}),
    "alpha: a list": adapter("nested deeper", {"lora_alpha": nested(500)}),
    "rank: 400 digits": adapter(ODD, {"r": HUGE}),
    "rank: another one": adapter("rank", {"r": 1 << 60}),
    "rank: a text": adapter(ODD, {"r": "2"}),
    "rank: a half": adapter(None, {"r": 2.5}),
    "rank pattern: a list": adapter(ODD, {"rank_pattern": ["x"]}),
    "rank pattern: 400 digits": adapter(ODD, {"rank_pattern": {"x": HUGE}}),
    "rank pattern: no expression": adapter("not a valid regular expression", {"rank_pattern": {"((": 2}}),
    "rank pattern: 100,000 brackets": adapter("together", {"rank_pattern": {"(" * 100_000: 2}}),
    "rank pattern: 400 brackets": adapter("not a valid regular expression", {"rank_pattern": {"(" * 400: 2}}),
    "rank pattern: 200 brackets in brackets": adapter(None, {"rank_pattern": {"(" * 200 + "x+" + ")" * 200: 2}}),
    "rank pattern: a backward reference": adapter("not supported", {"rank_pattern": {"(.+)\\1\\1+!": 2}}),
    "rank pattern: a look ahead": adapter("not supported", {"rank_pattern": {"(?=(.+)+!)x": 2}}),
    "rank pattern: 10,000 that are expressions": adapter(
        "together", {"rank_pattern": {f"x{n}+": 2 for n in range(10_000)}}
    ),
    "rank pattern: a repeat of 2^40": adapter(
        "not a valid regular expression", {"rank_pattern": {"x{1099511627776}": 2}}
    ),
    "rank pattern: exponential": adapter(None, {"rank_pattern": {"((.+)+)+[^j]": 2}}),
    "rank pattern: exponential by choices": adapter(None, {"rank_pattern": {"(.|.|.|.)*!": 2}}),
    "rank pattern: polynomial": adapter(None, {"rank_pattern": {".*" * 12 + "!": 2}}),
    "rank pattern: by optional parts": adapter(None, {"rank_pattern": {".?" * 40 + "." * 60: 2}}),
    "rank pattern: by choices in a row": adapter(None, {"rank_pattern": {"(..|.)" * 40 + "!": 2}}),
    "rank pattern: an escape sequence": adapter("not a valid regular expression", {"rank_pattern": {"(\x1b[2J\n": 2}}),
    "rank pattern: ten thousand": adapter(None, {"rank_pattern": {f"x{n}": 2 for n in range(10_000)}}),
    "alpha pattern: exponential": adapter(None, {"alpha_pattern": {"(([a-z._0-9]+)*)*!": 2}}),
    "alpha pattern: 400 digits": adapter(ODD, {"alpha_pattern": {".*q_proj": HUGE}}),
    "alpha pattern: infinite": adapter(ODD, '{"peft_type": "LORA", "r": 2, "alpha_pattern": {"x": 1e999}}'),
    "bias: a list": adapter(ODD, {"bias": [LONG]}),
    "rslora: a text": adapter(ODD, {"use_rslora": "yes"}),
    "modules to save: numbers": adapter(ODD, {"modules_to_save": [1]}),
    "modules to save: a name that leads out": adapter(None, {"modules_to_save": ["../../evil"]}),
    "init: a text of 100,000": adapter("init_lora_weights", {"init_lora_weights": "pissa" + LONG}),
    "init: not known": adapter("unknown", {"init_lora_weights": "subtracts_everything"}),
    "init: a list": adapter(ODD, {"init_lora_weights": ["pissa"]}),
    "init: infinite": adapter(ODD, '{"peft_type": "LORA", "r": 2, "init_lora_weights": 1e999}'),
    "replication: 10^9 layers": adapter("names layer", {"layer_replication": [[0, 10**9]]}),
    "replication: 100,000 times": adapter("makes 100000 layers", {"layer_replication": [[0, 1]] * 100_000}),
    "replication: backwards": adapter(ODD, {"layer_replication": [[1, 0]]}),
    "replication: less than none": adapter(ODD, {"layer_replication": [[-1, 1]]}),
    "tokens: that are not in the file": adapter("modules", {"trainable_token_indices": list(range(100_000))}),
    "tokens: less than none": adapter(ODD, {"trainable_token_indices": [-1]}),
    "tokens: row 10^18": adapter(
        "replaces row",
        {"trainable_token_indices": [10**18]},
        {"base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta": torch.ones(1, 4)},
    ),
    "tokens: twice": adapter(ODD, {"trainable_token_indices": [1, 1]}),
    "parameters: none of the base": adapter("does not have", {"target_parameters": ["nothing"]}),
    "blocks: 10^12": adapter("blocks", {"use_bdlora": {"nblocks": 10**12, "target_modules_bd_a": ["q_proj"]}}),
    "base: a path": adapter(
        None, {"base_model_name_or_path": "/etc/passwd", "auto_mapping": {"base_model_class": "x"}}
    ),
    "names: a path": adapter("does not have|no part", state={"../../evil": torch.zeros(2)}),
    "names: an escape sequence": adapter("does not have|could be", state={"\x1b[2J\nx.weight": torch.zeros(2)}),
    "names: nothing": adapter("does not have|no part", state={"": torch.zeros(2)}),
    "names: dots": adapter("does not have|no part", state={"." * 1000: torch.zeros(2)}),
    "names: a number": adapter("does not have|no part", state={7: torch.zeros(2)}),
    "names: 100,000 letters": adapter("does not have|no part", state={LONG: torch.zeros(2)}),
    "names: 100,000 letters of factors": adapter(
        "a{100}", state={f"{LONG}.lora_A.weight": torch.ones(2, 4), f"{LONG}.lora_B.weight": torch.ones(4, 2)}
    ),
    "names: lora_A ten thousand times": adapter("lacks|does not have", state={".lora_A.w" * 10_000: torch.zeros(2)}),
    "names: twice": adapter("twice", state={f"module.{MODULE}.lora_A.weight": torch.ones(2, 4)}),
    "names: 20,000 that are not there": adapter(
        "does not have", state={f"x.{n}.weight": torch.zeros(1) for n in range(20_000)}
    ),
    "names: saved twice, differently": adapter(
        "twice",
        {"modules_to_save": ["norm"]},
        {
            "base_model.model.model.norm.weight": torch.ones(4),
            "base_model.model.model.norm.modules_to_save.weight": torch.zeros(4),
        },
    ),
    "names: saved, and maybe the base's": adapter(
        "could be", {"modules_to_save": ["norm"]}, {"base_model.model.decoder.norm.weight": torch.ones(4)}
    ),
    "names: the original of what is not there": adapter(
        "does not have", state={"base_model.model.evil.original_module.weight": torch.ones(4)}
    ),
    "names: a resized original of half a vocabulary": adapter(
        "not both", state={"base_model.model.model.embed_tokens.base_layer.weight": torch.ones(900, 4)}
    ),
    "names: a buffer of the model": adapter(
        "shape mismatch", state={"base_model.model.model.norm.weight": torch.ones(7)}
    ),
    "names: a scalar for a weight": adapter(
        "mismatch", state={"base_model.model.model.embed_tokens.weight": torch.tensor(1.0)}
    ),
    "names: a scalar for the head": adapter(
        "shape mismatch", state={"base_model.model.lm_head.weight": torch.tensor(1.0)}
    ),
    "factors: a scalar": adapter("gathered", state={f"{MODULE}.lora_A.weight": torch.tensor(1.0)}),
    "factors: of nothing": adapter("gathered", state={f"{MODULE}.lora_A.weight": torch.ones(0, 4)}),
    "factors: three axes": adapter("unsupported kind of layer", state={f"{MODULE}.lora_A.weight": torch.ones(2, 4, 1)}),
    "factors: a view of 2^40": adapter(
        "larger than its storage", state={f"{MODULE}.lora_A.weight": torch.ones(1).expand(2, 1 << 40)}
    ),
    "factors: whole numbers": adapter("int64", state={f"{MODULE}.lora_A.weight": torch.ones(2, 4).long()}),
    "factors: not finite": adapter("not finite", state={f"{MODULE}.lora_A.weight": torch.full((2, 4), float("nan"))}),
    "factors: of another base": adapter("mismatch", state={f"{MODULE}.lora_B.weight": torch.ones(400, 2)}),
    "factors: a bias that is a scalar": adapter(
        "of shape|does not have|in the base has none", state={f"{MODULE}.lora_B.bias": torch.tensor(1.0)}
    ),
    "safetensors: a header of 2^60 bytes": after(
        lambda path: (path / "adapter_model.safetensors").write_bytes(b"\0" * 7 + b"\x10" + bytes(50)), "safetensors"
    ),
    "safetensors: 100,000 deep": header(b"[" * 100_000),
    "safetensors: a name with an escape sequence": header(
        {"\x1b[2J\nx.lora_A.weight": {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]}}
    ),
    "base's config: text_config is a text": adapter(None, config={"text_config": "evil"}),
    "base's config: text_config is a list": adapter(None, config={"text_config": [1]}),
    "base's config: text_config is a text, and the head is replaced": adapter(
        None,
        state={"base_model.model.lm_head.weight": torch.ones(8, 4)},
        config={"text_config": "evil", "tie_word_embeddings": True},
    ),
    "base's config: architectures is a number": adapter(None, config={"architectures": 7}),
    "base's config: model_type is a list": adapter("`model_type` that is a list", config={"model_type": ["llama"]}),
    "run: os.system for the settings": run("attack|not 'LORA'|scale is unknown", "os.system"),
    "run: exponential pattern": run(None, {"rank_pattern": {"((.+)+)+[^j]": 2}}),
    "run: alpha of 400 digits": run("over the limit", {"lora_alpha": HUGE}),
    "run: alpha that is a list": run(ODD, {"lora_alpha": [[LONG]]}),
    "run: targets that are numbers": run(None, {"target_modules": [1, None, []]}),
    "run: modules to save of lists": run(ODD, {"modules_to_save": [[], {}]}),
    "run: a bias that is a list": run(ODD, {"bias": [1]}),
    "run: keys that are not strings": run("not JSON", {7: 8, None: 1}),
    "run: code": run(None, {"auto_map": {"AutoModel": "evil.Evil"}}),
    "run: text_config is a text": run(None, text_config="evil", tie_word_embeddings=True),
    "run: apart, alpha of 400 digits": run("over the limit", {"lora_alpha": HUGE}, {"adapter": "split"}),
    "run: apart, code": run(None, {"auto_map": {"AutoModel": "evil.Evil"}}, {"adapter": "split"}),
    "paddle: os.system": paddle(ATTACK, change=evil(call("os", "system", text(SHELL)))),
    "paddle: eval": paddle(ATTACK, change=evil(call("builtins", "eval", text(PYTHON)))),
    "paddle: another call": paddle(None, change=evil(call("evil", "Evil"))),
    "paddle: cut": paddle("truncated|no arrays", change=lambda data: data[: len(data) // 2]),
    "paddle: a pickle after the pickle": paddle("after its end", change=lambda data: data + b"cos\nsystem\n."),
    "paddle: no state dict": paddle("no state dict|no arrays", change=lambda _: pickle.dumps([1], 4)),
    "paddle: nothing": paddle("no arrays|empty", change=lambda _: b""),
    "paddle: settings 100,000 deep": paddle("not valid JSON", "[" * 100_000),
    "paddle: alpha of 400 digits": paddle(ODD, {"lora_alpha": HUGE}),
    "paddle: rank of 400 digits": paddle(ODD, {"r": HUGE}),
    "paddle: scaling of 400 digits": paddle("scaling", {"scaling": HUGE}),
    "paddle: scaling of a list": paddle(None, {"scaling": [LONG]}),
    "paddle: scaling that is not a number": paddle("scaling", '{"r": 2, "lora_alpha": 4, "scaling": NaN}'),
    "paddle: rslora is a text": paddle(ODD, {"rslora": LONG}),
    "paddle: trainable_bias is a list": paddle(None, {"trainable_bias": [1]}),
    "paddle: 2^60 ranks": paddle("ranks", {"tensor_parallel_degree": 1 << 60}),
    "paddle: ranks of 400 digits": paddle("ranks", {"tensor_parallel_degree": HUGE}),
    "paddle: rank 999, stage 999": paddle("ranks", name="lora_model_state.tp999_pp999.pdparams"),
    "paddle: rank in other digits": paddle(None, name="lora_model_state.tp٠٠.pdparams"),
    "paddle: a scalar": paddle("unexpected keys", arrays={f"{PADDLE}.lora_A": np.float32(1).reshape(())}),
    "paddle: a scalar B": paddle("unexpected keys", arrays={f"{PADDLE}.lora_B": np.float32(1).reshape(())}),
    "paddle: of nothing": paddle("shape|gathered", arrays={f"{PADDLE}.lora_A": np.ones((4, 0), "f4")}),
    "paddle: three axes": paddle("shape", arrays={f"{PADDLE}.lora_A": np.ones((4, 2, 1), "f4")}),
    "paddle: whole numbers": paddle("int64|dtype", arrays={f"{PADDLE}.lora_A": np.ones((4, 2), "i8")}),
    "paddle: a name with an escape sequence": paddle("unexpected keys", arrays={"\x1b[2J\n": np.ones(2)}),
    "paddle: a name that leads out": paddle("unexpected keys", arrays={"../../evil": np.ones(2)}),
    "paddle: a name that is a number": paddle("unexpected keys", arrays={7: np.ones(2)}),
    "paddle: half a pair": paddle(
        "unexpected keys", arrays={"llama.layers.0.self_attn.k_proj.lora_A": np.ones((4, 2))}
    ),
    "paddle: another family": paddle("model_type|family|of the unsupported type", config={"model_type": "../../evil"}),
    "paddle: a family that is a list": paddle(
        "model_type|family|of the unsupported type|not", config={"model_type": ["llama"]}
    ),
    "paddle: 2^30 layers": paddle("more than any model has", config={"num_hidden_layers": 1 << 30}),
    "paddle: layers of 400 digits": paddle("number|num_hidden_layers", config={"num_hidden_layers": HUGE}),
    "paddle: theta of 400 digits": paddle("number|rope_theta", config={"rope_theta": HUGE}),
    "paddle: ntk with 1e308": paddle(
        "number|rope|large", config={"rope_scaling_type": "ntk", "rope_scaling_factor": 1e308, "rope_theta": 1e308}
    ),
    "paddle: heads that do not divide": paddle("divide|heads", config={"num_attention_heads": 3}),
}
