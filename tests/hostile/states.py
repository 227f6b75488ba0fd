"""Plain torch files and Lightning's: indices and shards that lead out, state dicts and configurations that lie."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.hostile.case import CANARY, Case
from tests.hostile.honest import CONFIG, members, repacked, save, weights
from tests.hostile.pickles import PYTHON, SHELL, call, text

ATTACK = "nothing was run"
UNKNOWN = "not of a training format"
NO_FILE = (
    "not a torch file|not a regular file|no regular file|is missing|truncated|damaged|not of a training format"
    "|no state dict"
)
INDEX = "pytorch_model.bin.index.json"
FIRST, SECOND = (f"pytorch_model-0000{number}-of-00002.bin" for number in (1, 2))
EMBEDDING = "model.embed_tokens.weight"
HUGE = 10**400


def folder_of(folder: Path, **config: Any) -> Path:
    """An honest folder of two shards with an index."""
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    names = list(weights())
    parts = {FIRST: names[:5], SECOND: names[5:]}
    for name, own in parts.items():
        save(folder, {one: weights()[one] for one in own}, name)
    weight_map = {one: name for name, own in parts.items() for one in own}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def index(content: Any, refused: str | None) -> Case:
    """A folder whose index has other entries, or this text."""

    def build(folder: Path) -> Path:
        folder_of(folder)
        weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
        written = {"weight_map": {**weight_map, **content} if isinstance(content, dict) else content}
        (folder / INDEX).write_text(content if isinstance(content, str) else json.dumps(written))
        return folder

    return Case(build, refused)


def shard(put: Callable[[Path], object], refused: str | None, name: str = SECOND) -> Case:
    """A folder in which something else stands for a file."""

    def build(folder: Path) -> Path:
        folder_of(folder)
        (folder / name).unlink(missing_ok=True)
        put(folder / name)
        return folder

    return Case(build, refused)


def numbered(refused: str, *names: str) -> Case:
    """A folder of shards without an index, under these names."""

    def build(folder: Path) -> Path:
        (folder / "config.json").write_text(json.dumps(CONFIG))
        for name in names:
            save(folder, weights(), name)
        return folder

    return Case(build, refused)


def state(refused: str | None, change: Callable[[dict[str, Any]], Any], config: Any = None, suffix: str = "pt") -> Case:
    """A file with a state dict after `change`, or with what that returns."""

    def build(folder: Path) -> Path:
        written = config if isinstance(config, str) else json.dumps({**CONFIG, **(config or {})})
        (folder / "config.json").write_text(written)
        own: dict[str, Any] = weights()
        changed = change(own)
        return save(folder, own if changed is None else changed, f"x.{suffix}")

    return Case(build, refused)


def more(value: bytes, refused: str | None, around: Callable[[dict[str, Any]], Any] = dict) -> Case:
    """A file with one more value next to the weights (or their container), made by these opcodes."""

    def build(folder: Path) -> Path:
        (folder / "config.json").write_text(json.dumps(CONFIG))
        parts = members(around(weights()))
        return repacked(folder, {**parts, "x/data.pkl": parts["x/data.pkl"][:-1] + text("evil") + value + b"s."})

    return Case(build, refused)


def lightning(own: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """What Lightning saves."""
    named = {f"model.{name}": tensor for name, tensor in own.items()}
    return {"state_dict": named, "pytorch-lightning_version": "2.4.0", "hyper_parameters": {}, **fields}


def changed(name: str, value: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda own: own.update({name: value})


HONEST = {
    "torch": Case(folder_of, None),
    "lightning": state(None, lightning, suffix="ckpt"),
}
CASES: dict[str, Case] = {
    **{f"honest: {name}": case for name, case in HONEST.items()},
    "index: a shard outside": index({"x": f"../in/{FIRST}"}, "invalid shard name"),
    "index: an absolute shard": index({"x": "/etc/passwd"}, "invalid shard name"),
    "index: an absolute shard of its kind": index({"x": "/etc/evil.bin"}, "invalid shard name"),
    "index: the parent": index({"x": ".."}, "invalid shard name"),
    "index: a shard of Windows": index({"x": "..\\evil.bin"}, "is missing"),
    "index: a number": index({"x": 7}, "invalid shard name"),
    "index: a list": index({"x": [FIRST]}, "invalid shard name"),
    "index: a zero": index({"x": "a\0.bin"}, "is missing"),
    "index: an escape sequence": index({"x": "\x1b[2J\n.bin"}, "is missing"),
    "index: no text": index({"x": "\udcff.bin"}, "is missing|cannot be read"),
    "index: a name of 60,000 letters": index({"x": "a" * 60_000 + ".bin"}, "is missing|cannot be read|aaa"),
    "index: a list of all": index([1], "no `weight_map`"),
    "index: nothing": index("{}", "no `weight_map`"),
    "index: 100,000 deep": index("[" * 100_000, "not valid JSON"),
    "index: no text at all": index('{"weight_map": "\x00"}', "not valid JSON"),
    "index: a tensor that is not there": index({"x": FIRST}, "differ in"),
    "index: 20,000 shards": index({f"x{n}": f"{n}.bin" for n in range(20_000)}, "are missing"),
    "index: 8 GB": shard(lambda path: os.truncate(path.touch() or path, 8 << 30), "too large", INDEX),  # type: ignore[func-returns-value]
    "index: a pipe": shard(lambda path: os.mkfifo(path), "not a regular file", INDEX),
    "index: two": shard(lambda path: path.write_text("{}"), "indices", "\x1b[2J.bin.index.json"),
    "shard: a pipe": shard(lambda path: os.mkfifo(path), NO_FILE),
    "shard: a folder": shard(Path.mkdir, NO_FILE),
    "shard: a link to /etc/passwd": shard(lambda path: path.symlink_to("/etc/passwd"), NO_FILE),
    "shard: a link to /dev/zero": shard(lambda path: path.symlink_to("/dev/zero"), NO_FILE),
    "shard: a link to itself": shard(lambda path: path.symlink_to(path.name), NO_FILE),
    "shard: nothing": shard(Path.touch, NO_FILE),
    "shard: the other one": shard(lambda path: path.symlink_to(FIRST), "differ in"),
    "shard: a list": shard(lambda path: torch.save([1], path), "no state dict"),
    "shards: of 10^11": numbered("is missing", "pytorch_model-00001-of-99999999999.bin"),
    "shards: of 10^100": numbered("is missing", f"pytorch_model-00001-of-{10**100}.bin"),
    "shards: number 10^11": numbered("is missing", "pytorch_model-99999999999-of-00002.bin"),
    "shards: of torchtune, number 10^11": numbered("is missing", "hf_model_99999999999_0.pt"),
    "shards: number 0": numbered("is missing", "pytorch_model-00000-of-00002.bin"),
    "shards: of several numbers": numbered(
        "several checkpoints", "pytorch_model-00001-of-00002.bin", "pytorch_model-00001-of-00003.bin"
    ),
    "shards: the same twice": numbered(
        "duplicate keys in the files", "pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"
    ),
    "state: os.system": more(call("os", "system", text(SHELL)), ATTACK + "|" + UNKNOWN),
    "state: another call": more(call("evil", "Evil"), "is an object, not a plain tensor"),
    "state: names that lead out": state("outside the model|two models", changed("../../evil", torch.zeros(2))),
    "state: an escape sequence": state("outside the model|two models", changed("\x1b[2J\n.x", torch.zeros(2))),
    "state: names that are numbers": state("outside the model|two models", lambda own: {**own, 7: torch.zeros(2)}),
    "state: a name of 100,000 letters": state("no part of|two models|aaa", changed("a" * 100_000, torch.zeros(2))),
    "state: no part of the model, without dots": state("outside the model|two models", changed("", torch.zeros(2))),
    "state: a scalar for a matrix": state("of another shape", changed(EMBEDDING, torch.tensor(1.0))),
    "state: three axes for a matrix": state("shape", changed(EMBEDDING, torch.zeros(8, 4, 1))),
    "state: 2^40 columns": state("larger than its storage", changed(EMBEDDING, torch.zeros(1).expand(8, 1 << 40))),
    "state: a layer of 10^100": state(
        "layer|no part of", changed(f"model.layers.{10**100}.mlp.up_proj.weight", torch.zeros(2))
    ),
    "state: a layer in other digits": state(
        "layer|no part of|gaps|lacks|more", changed("model.layers.٣.mlp.up_proj.weight", torch.zeros(2))
    ),
    "state: a layer of 5000 digits": state(
        "layer|no part of", changed(f"model.layers.{'9' * 5000}.mlp.up_proj.weight", torch.zeros(2))
    ),
    "state: 15,000 layers of one tensor": state(
        "impossible number",
        lambda own: own.update({f"model.layers.{n}.t{n}": torch.zeros(1) for n in range(1, 15_000)}),
        {"num_hidden_layers": 15_000},
    ),
    "state: nested": state("not of a known training format", lambda own: {"model": {"model": own}}),
    "state: quantized": state("quantized", changed("model.layers.0.mlp.up_proj.qweight", torch.zeros(2))),
    "config: 100,000 deep": state("not valid JSON", lambda own: None, "[" * 100_000),
    "config: a list": state("not a JSON object", lambda own: None, "[]"),
    "config: architectures is a number": state(None, lambda own: None, {"architectures": 7}),
    "config: architectures of lists": state(
        "not contain a model configuration",
        lambda own: None,
        {"architectures": [[]], "model_type": None} and '{"architectures": [[1]]}',
    ),
    "config: a model_type that leads out": state(
        "not a causal language model", lambda own: None, {"model_type": "../../evil"}
    ),
    "config: a model_type that is a list": state(
        "not a causal language model", lambda own: None, {"model_type": ["llama"]}
    ),
    "config: sizes of 400 digits": state(
        "more than any model has", lambda own: None, {"hidden_size": HUGE, "num_hidden_layers": HUGE}
    ),
    "config: sizes that are lists": state(None, lambda own: None, {"head_dim": [1], "intermediate_size": {}}),
    "config: no heads": state("not positive numbers", lambda own: None, {"num_attention_heads": 0}),
    "config: heads less than none": state("of another shape", lambda own: None, {"num_attention_heads": -1}),
    "config: 2^60 layers": state("layer", lambda own: None, {"num_hidden_layers": 1 << 60}),
    "config: layers that are a text": state("its configuration says", lambda own: None, {"num_hidden_layers": "1"}),
    "config: tied by a list": state(None, lambda own: None, {"tie_word_embeddings": [0]}),
    "config: quantized by a number": state("quantized", lambda own: None, {"quantization_config": 7}),
    "config: a version with an escape sequence": state(None, lambda own: None, {"transformers_version": "\x1b[2J\n"}),
    "config: code": state(None, lambda own: None, {"auto_map": {"AutoModel": "evil.Evil"}}),
    "lightning: os.system among the hyper-parameters": more(
        call("os", "system", text(SHELL)), ATTACK + "|" + UNKNOWN, lambda own: lightning(own)
    ),
    "lightning: eval among the hyper-parameters": more(
        call("builtins", "eval", text(PYTHON)), ATTACK + "|" + UNKNOWN, lambda own: lightning(own)
    ),
    "lightning: another call among the hyper-parameters": more(
        call("evil", "Evil", text(CANARY)), None, lambda own: lightning(own)
    ),
    "lightning: a list a million deep": more(
        b"]" * 1_000_000 + b"a" * 999_999,
        "nested deeper|not of a training format|configuration",
        lambda own: lightning(own),
    ),
    "lightning: a version with an escape sequence": state(
        None, lambda own: lightning(own, **{"pytorch-lightning_version": "\x1b[2J\n"})
    ),
    "lightning: a version that is a list": state(
        None, lambda own: lightning(own, **{"pytorch-lightning_version": [[]]})
    ),
    "lightning: no state dict": state(
        "not of a known training format", lambda own: {"pytorch-lightning_version": "2", "state_dict": [1]}
    ),
}
