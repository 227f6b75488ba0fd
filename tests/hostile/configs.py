"""Configurations and tokenizers inside a checkpoint or next to it: code, paths, bombs, invalid sizes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from tests.hostile.case import CANARY, Case
from tests.hostile.honest import composer, meta, mindspore, paddle, save


def tokenizer(refused: str | None, files: Mapping[Any, Any]) -> Case:
    """A run with these tokenizer entries: name to (extension, content)."""
    entries = {
        name: {"file_extension": value[0], "content": value[1]} if isinstance(value, tuple) else value
        for name, value in files.items()
    }
    return Case(lambda folder: save(folder, composer(tokenizer=entries)), refused)


def config(refused: str | None, **fields: Any) -> Case:
    """A Composer run with these fields in its configuration."""
    return Case(lambda folder: save(folder, composer(config=fields)), refused)


def params(refused: str | None, fields: Any) -> Case:
    """A folder of Meta's with these fields (or this text) as `params.json`."""
    return Case(lambda folder: meta(folder, fields), refused)


def run_yaml(text: str, refused: str | None) -> Case:
    """A MindSpore file with this YAML given by the user."""

    def build(folder: Path) -> Path:
        mindspore(folder)
        (folder / "evil.yaml").write_text(text)
        return folder / "x.ckpt"

    return Case(build, refused, {"config": ["evil.yaml"]})


def beside(refused: str | None, files: Mapping[str, bytes | str], make: Callable[[Path], Path] = meta) -> Case:
    """A folder with these files next to the weights."""

    def build(folder: Path) -> Path:
        source = make(folder)
        for name, content in files.items():
            (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
        return source

    return Case(build, refused)


def nested(depth: int) -> Any:
    """A list so deep."""
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


def laughs() -> Any:
    """A list of 2^40 items that takes 40 lists of memory."""
    value: Any = ["ha", "ha"]
    for _ in range(40):
        value = [value, value]
    return value


def circle() -> dict[str, Any]:
    """A dict that contains itself."""
    value: dict[str, Any] = {}
    value["self"] = value
    return value


OUTSIDE = "outside the folder"
JSON = (".json", {"version": "1.0"})
CODE = f"open({CANARY!r}, 'w')"
MERGE = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(98 + n)}: &{chr(98 + n)} [{', '.join([f'*{chr(97 + n)}'] * 9)}]\n" for n in range(12)
)
SHAPES = "says|params.json|shards|needed|lacks|divide"


def accessory_like(folder: Path) -> Path:
    """Accessory's folder: the names of Meta's, below `llma.`."""
    meta(folder)
    content = torch.load(folder / "consolidated.00.pth")
    (folder / "consolidated.00.pth").unlink()
    torch.save(
        {"model": {f"llma.{name}": tensor for name, tensor in content.items()}},
        folder / "consolidated.00-of-01.model.pth",
    )
    return folder


CASES: dict[str, Case] = {
    "tokenizer: a name that leads out": tokenizer(OUTSIDE, {"../../evil.json": JSON}),
    "tokenizer: a name that leads out without its extension": tokenizer(OUTSIDE, {"../../evil": JSON}),
    "tokenizer: an extension that leads out": tokenizer(OUTSIDE, {"x": ("/../../evil.json", {})}),
    "tokenizer: an absolute name": tokenizer(OUTSIDE, {"/etc/cron.d/evil.json": JSON}),
    "tokenizer: a name of Windows": tokenizer(OUTSIDE, {"..\\evil.json": JSON}),
    "tokenizer: a hidden file": tokenizer(OUTSIDE, {".bashrc": ("", "x")}),
    "tokenizer: the parent": tokenizer(OUTSIDE, {"..": ("", "x")}),
    "tokenizer: no name": tokenizer(None, {"": ("", "x")}),
    "tokenizer: Python": tokenizer(None, {"tokenization_evil.py": (".py", CODE)}),
    "tokenizer: a pickle": tokenizer(None, {"tokenizer.pkl": (".pkl", b"cos\nsystem\n.")}),
    "tokenizer: a shared library": tokenizer(None, {"evil.so": (".so", b"\x7fELF")}),
    "tokenizer: another config.json": tokenizer(None, {"config.json": (".json", {"auto_map": {"AutoModel": "x.X"}})}),
    "tokenizer: weights": tokenizer(None, {"model.safetensors": (".safetensors", b"x")}),
    "tokenizer: the index of weights": tokenizer(
        None, {"model.safetensors.index": (".json", {"weight_map": {"a": "../x"}})}
    ),
    "tokenizer: the manifest": tokenizer(None, {"llmconv.json": JSON}),
    "tokenizer: the journal": tokenizer(None, {"journal.jsonl": (".jsonl", "x"), "lock": ("", "x")}),
    "tokenizer: a nul in the name": tokenizer(None, {"tokenizer\0.json": JSON}),
    "tokenizer: an escape sequence in the name": tokenizer(None, {"\x1b[2J.json": JSON}),
    "tokenizer: a name of a million letters": tokenizer(None, {"a" * 1_000_000: JSON}),
    "tokenizer: a reserved name of Windows": tokenizer(None, {"CON.json": JSON}),
    "tokenizer: a name that is a number": tokenizer(None, {7: JSON}),
    "tokenizer: a full-width stop": tokenizer(None, {"\uff0e\uff0e/evil".replace("/", "\u2215"): JSON}),
    "tokenizer: no content": tokenizer("without content|wrong type", {"tokenizer.json": {"file_extension": ".json"}}),
    "tokenizer: an entry that is a text": tokenizer("without content", {"tokenizer.json": "x"}),
    "tokenizer: an extension that is a number": tokenizer("without content", {"tokenizer": {"file_extension": 7}}),
    "tokenizer: bytes for JSON": tokenizer("wrong type", {"tokenizer.json": (".json", b"{}")}),
    "tokenizer: a number for text": tokenizer("wrong type", {"vocab.txt": (".txt", 7)}),
    "tokenizer: lines that are no texts": tokenizer("wrong type", {"vocab.txt": (".txt", ["a", 7])}),
    "tokenizer: a tensor in JSON": tokenizer("not JSON", {"tokenizer.json": (".json", {"x": torch.ones(1)})}),
    "tokenizer: a set in JSON": tokenizer("not JSON", {"tokenizer.json": (".json", {"x": {1}})}),
    "tokenizer: JSON 150 deep": tokenizer("too large or nested", {"tokenizer.json": (".json", nested(150))}),
    "tokenizer: billion laughs": tokenizer("again and again", {"tokenizer.json": (".json", laughs())}),
    "tokenizer: JSON that contains itself": tokenizer(
        "a container that contains itself", {"tokenizer.json": (".json", circle())}
    ),
    "tokenizer: half a surrogate in JSON": tokenizer(
        "invalid text|surrogate", {"tokenizer.json": (".json", {"x": "\ud800"})}
    ),
    "tokenizer: half a surrogate in lines": tokenizer("invalid text|surrogate", {"merges.txt": (".txt", ["\ud800"])}),
    "tokenizer: not a number": tokenizer(None, {"tokenizer_config.json": (".json", {"x": float("nan")})}),
    "tokenizer: auto_map": tokenizer(
        None,
        {
            "tokenizer_config.json": (
                ".json",
                {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}, "tokenizer_class": "Evil"},
            )
        },
    ),
    "config: auto_map": config(None, auto_map={"AutoModelForCausalLM": "evil--evil.Evil"}),
    "config: trust_remote_code": config(None, trust_remote_code=True),
    "config: auto_map below": config(None, text_config={"auto_map": {"AutoModel": "evil.Evil"}}),
    "config: attention from a repository": config(None, _attn_implementation_internal="evil/evil"),
    "config: billion laughs": config("again and again", x=laughs()),
    "config: contains itself": config("a container that contains itself", x=circle()),
    "config: 150 deep": config("too large or nested", x=nested(150)),
    "config: a command for a model type": config("not a causal language model", model_type="llama; rm -rf /"),
    "config: an escape sequence for a model type": config("not a causal language model", model_type="\x1b[2Jllama"),
    "config: a list for a model type": config("not a causal language model", model_type=["llama"]),
    "config: a model type of a million letters": config("not a causal language model", model_type="a" * 1_000_000),
    "config: a billion layers": config("its configuration says", num_hidden_layers=10**9),
    "config: 10^30 layers": config("its configuration says", num_hidden_layers=10**18),
    "config: negative layers": config("its configuration says", num_hidden_layers=-1),
    "config: a text for layers": config("its configuration says|no usable|number", num_hidden_layers="1"),
    "config: not a number for layers": config(
        "its configuration says|no usable|number", num_hidden_layers=float("nan")
    ),
    "config: a list for layers": config("its configuration says|no usable|number", num_hidden_layers=[1]),
    "config: a huge vocabulary": config(r"expected \[1000000000000000, 4\]", vocab_size=10**15),
    "params: a billion layers": params("lacks|" + SHAPES, {"n_layers": 10**9}),
    "params: layers for all memory": params("lacks|" + SHAPES, {"n_layers": 10**18}),
    "params: half a layer": params(SHAPES, {"n_layers": 0.5}),
    "params: infinite layers": params(SHAPES, {"n_layers": float("inf")}),
    "params: no number of layers": params(SHAPES, {"n_layers": float("nan")}),
    "params: true layers": params(SHAPES, {"n_layers": True, "n_heads": True}),
    "params: negative heads": params(SHAPES, {"n_heads": -2}),
    "params: more heads than columns": params(SHAPES, {"n_heads": 10**6}),
    "params: three heads": params(SHAPES, {"n_heads": 3}),
    "params: a text for kv heads": params(SHAPES, {"n_kv_heads": "two"}),
    "params: negative kv heads": params(SHAPES, {"n_kv_heads": -1}),
    "params: a list for kv heads": params(SHAPES, {"n_kv_heads": [2]}),
    "params: a huge dim": params(SHAPES, {"dim": 10**15}),
    "params: a huge multiple": params(SHAPES, {"multiple_of": 10**300}),
    "params: a negative multiple": params(SHAPES, {"multiple_of": -2}),
    "params: a text for a multiple": params(SHAPES, {"multiple_of": "x"}),
    "params: a text for the multiplier": params(SHAPES, {"ffn_dim_multiplier": "x"}),
    "params: an infinite multiplier": params(SHAPES, {"ffn_dim_multiplier": float("inf")}),
    "params: a dict for theta": params("params.json", {"rope_theta": {"factor": 8}}),
    "params: a text for theta": params("params.json", {"rope_theta": "x"}),
    "params: not a number for epsilon": params("params.json", {"norm_eps": float("nan")}),
    "params: a text for the scaling": params("params.json", {"use_scaled_rope": True, "rope_scaling_factor": "x"}),
    "params: nested": params("params.json", {"model": {"model": {}}}),
    "params: JSON 100,000 deep": params("not valid JSON", "[" * 100_000),
    "params: a list": params("not a JSON object", "[]"),
    "params: no JSON": params("not valid JSON", "{'dim': __import__('os')}"),
    "params: a number of 10,000 digits": params("not valid JSON|" + SHAPES, '{"dim": ' + "9" * 10_000 + "}"),
    "params: the same field twice": params(
        SHAPES, '{"dim": 4, "dim": 8, "n_layers": 1, "n_heads": 2, "norm_eps": 1e-5}'
    ),
    "params: bytes that are not text": beside("not valid JSON", {"params.json": b"\xff\xfe\x00"}),
    "params: empty": beside("not valid JSON", {"params.json": b""}),
    "sentencepiece: no model": beside("not a sentencepiece model", {"tokenizer.model": b"\x00\xff\xff\xff"}),
    "sentencepiece: a length beyond the file": beside(
        "not a sentencepiece model", {"tokenizer.model": b"\x0a\xff\xff\xff\xff\x7f"}
    ),
    "sentencepiece: bos beyond the pieces": beside(
        "special tokens with larger ids", {"tokenizer.model": b"\x0a\x07\x0a\x05hello\x12\x03\xc8\x02\x63"}
    ),
    "sentencepiece: empty": beside("special tokens with larger ids", {"tokenizer.model": b""}),
    "sentencepiece: no pieces": beside("special tokens with larger ids", {"tokenizer.model": b"\x12\x00"}),
    "tiktoken: ranks with gaps": beside("ranks", {"tokenizer.model": b"YQ== 0\nYg== 7\n"}),
    "tiktoken: a huge rank": beside("tiktoken|ranks", {"tokenizer.model": b"YQ== " + b"9" * 5000}),
    "tokenizer.json: 100,000 deep": beside("valid JSON", {"tokenizer.json": "[" * 100_000}, accessory_like),
    "accessory: half a head": beside(
        "heads|n_kv_heads",
        {"config.json": '{"dim": 4, "n_layers": 1, "n_heads": 2, "n_kv_heads": 0.5}'},
        accessory_like,
    ),
    "accessory: half a multiple": beside(
        "multiple_of", {"config.json": '{"dim": 4, "n_layers": 1, "n_heads": 2, "multiple_of": 0.5}'}, accessory_like
    ),
    "accessory: a plugin that is a path": beside(
        "plugin", {"meta.json": '{"llama_type": "../../evil"}'}, accessory_like
    ),
    "accessory: a text for the mixture": beside(
        "moe", {"config.json": '{"dim": 4, "n_layers": 1, "n_heads": 2, "moe": "x"}'}, accessory_like
    ),
    "paddle config: 100,000 deep": beside("not valid JSON", {"config.json": "[" * 100_000}, paddle),
    "paddle config: a list for a type": beside(
        "unsupported type", {"config.json": '{"model_type": ["llama"]}'}, paddle
    ),
    "paddle config: a huge degree": beside(
        None,
        {
            "config.json": json.dumps(
                {
                    **composer()["state"]["integrations"]["huggingface"]["model"]["config"]["content"],
                    "tensor_parallel_degree": 10**9,
                }
            )
        },
        paddle,
    ),
    "yaml: python/object/apply": run_yaml("model: !!python/object/apply:os.system ['touch /tmp/x']", "not valid YAML"),
    "yaml: python/name": run_yaml("model: !!python/name:os.system", "not valid YAML"),
    "yaml: python/module": run_yaml("model: !!python/module:antigravity", "not valid YAML"),
    "yaml: an own tag": run_yaml("model: !evil {a: b}", "not valid YAML"),
    "yaml: billion laughs": run_yaml(MERGE, "not valid YAML"),
    "yaml: an anchor that contains itself": run_yaml("a: &a [*a]", "not valid YAML"),
    "yaml: 10,000 deep": run_yaml("[" * 10_000, "not valid YAML"),
    "yaml: 2 MB": run_yaml("a: " + "x" * (2 << 20), "too large"),
    "yaml: a list": run_yaml("- a\n- b", "not a YAML mapping"),
    "yaml: two documents": run_yaml("a: 1\n---\nb: 2", "not valid YAML"),
    "yaml: an impossible date": run_yaml("a: 2001-99-99", "not valid YAML"),
    "yaml: bytes that are not text": run_yaml("a: \x00", "not valid YAML"),
    "yaml: sizes that are texts": run_yaml(
        "model: {model_config: {hidden_size: big, num_layers: 1, num_heads: 2}}", "configuration of"
    ),
    "yaml: infinite layers": run_yaml(
        "model: {model_config: {hidden_size: 4, num_layers: .inf, num_heads: 2}}", "configuration of"
    ),
    "yaml: a billion layers": run_yaml(
        "model: {model_config: {hidden_size: 4, num_layers: 1000000000, num_heads: 2, vocab_size: 8}}",
        "lacks|configuration",
    ),
    "yaml: keys that are lists": run_yaml("? [a]\n: b", "YAML"),
}
