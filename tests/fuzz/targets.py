"""One target per parser: honest inputs to begin with, and what reads one."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import pickle
import struct
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from llmconv.checkpoint import open_checkpoint, read_json
from llmconv.convert.adapters.lora.config import parse_config
from llmconv.convert.deltas.exact import open_exact
from llmconv.convert.formats import formats
from llmconv.convert.formats.mindformers.mindspore.ckpt_file import read_ckpt
from llmconv.convert.formats.mindformers.mindspore.strategy import read_strategy
from llmconv.convert.formats.paddle.pdparams import open_pdparams
from llmconv.convert.inspect import inspect
from llmconv.convert.models.config_file import read_config_file
from llmconv.convert.state_dicts.distributed.folder import named_leaves, open_folder
from llmconv.convert.state_dicts.distributed.metadata import TensorItem
from llmconv.convert.state_dicts.raw_tensors import torch_tensors
from llmconv.convert.tokenizers.sentencepiece_json import parse_sentencepiece, tokenizer_json
from llmconv.convert.tokenizers.tiktoken_json import parse_tiktoken, tiktoken_json
from llmconv.files.packing import unpack
from llmconv.files.packing.compression import find_codec
from llmconv.files.packing.tar_archive import RECORD, is_tar
from llmconv.files.pickles.reader import read_pickle
from llmconv.files.safetensors_file import read_header
from llmconv.files.sources import reading_safely
from llmconv.model_code import collect_code
from llmconv.output.manifest import read_manifest
from llmconv.runtime.onnxruntime.adapter_file import encode_adapter, read_adapter
from llmconv.runtime.onnxruntime.graph_entry import graph_entries
from llmconv.runtime.onnxruntime.guard import load_guarded, weight_bytes
from llmconv.runtime.onnxruntime.session_file import read_session_file
from llmconv.serve.api_errors import ApiError
from llmconv.serve.openai_schema import chat_request, completion_request, parse_json
from tests.hostile import adapters, deltas, honest, legacy
from tests.hostile.dcp import folder_of
from tests.hostile.pickles import PYTHON, call, text

Files = Mapping[str, bytes]


@dataclass(frozen=True)
class Target:
    """A parser.

    Attributes:
        name: of the file that changes.
        seeds: honest contents of it.
        read: reads it, given its path.
        beside: the other files of its folder, by name.
        words: pieces that mean something in the format.
    """

    name: str
    seeds: Callable[[], list[bytes]]
    read: Callable[[Path], object]
    beside: Callable[[], Files] = dict
    words: tuple[bytes, ...] = ()


def built(build: Callable[[Path], Path], name: str) -> bytes:
    """The content of a file that a builder of honest inputs makes."""
    return _files(build)[name]


@lru_cache
def _files(build: Callable[[Path], Path]) -> Files:
    with tempfile.TemporaryDirectory() as folder:
        place = build(Path(folder))
        root = place if place.is_dir() else place.parent
        return {path.name: path.read_bytes() for path in root.iterdir() if path.is_file()}


def others(build: Callable[[Path], Path], name: str) -> Files:
    """The files beside it."""
    return {other: content for other, content in _files(build).items() if other != name}


def composer(folder: Path) -> Path:
    """A Composer run."""
    return honest.save(folder, honest.composer())


def old_file(folder: Path) -> Path:
    """A file of before torch 1.6."""
    return legacy.HONEST["legacy"].build(folder)


def adapter(folder: Path) -> Path:
    """An adapter of PEFT."""
    return adapters.HONEST["peft"].build(folder)


def delta(folder: Path) -> Path:
    """An exact delta."""
    return next(case for case in deltas.WRITTEN.values() if case.command == "delta").build(folder)


def hugging_face(folder: Path) -> Path:
    """A folder with an index and two shards."""
    from safetensors.torch import save_file  # noqa: PLC0415 - only here

    weights = honest.weights()
    names = list(weights)
    halves = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for file, part in halves.items():
        save_file({name: weights[name] for name in part}, folder / file, {"format": "pt"})
    index = {name: file for file, part in halves.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (folder / "config.json").write_text(json.dumps(honest.CONFIG))
    return folder


def megatron(folder: Path) -> Path:
    """The file of the only rank of a Megatron run."""
    from tests.builders.megatron_saves import Shape, hugging_face_state, save_megatron  # noqa: PLC0415 - only here

    shape = Shape(layers=1)
    run = save_megatron(folder / "run", shape, hugging_face_state(shape))
    return (run / "iter_0000007/mp_rank_00/model_optim_rng.pt").rename(folder / "model_optim_rng.pt")


def read_megatron(path: Path) -> None:
    """The model in the file of a rank, with the size of its vocabulary."""
    formats()["megatron"].open(path, {"vocab_size": 30}, None)


def pickles() -> list[bytes]:
    """Values of several protocols, and calls."""
    value = OrderedDict(a=[1, "text", 2.5, (3, b"bytes")], b={"c": {1, 2}, 10**30: None, (1, 2): frozenset([3])})
    calls = [b"\x80\x02" + call(*what, text(PYTHON)) + b"." for what in (("evil", "Evil"), ("torch", "Size"))]
    return [*(pickle.dumps(value, protocol) for protocol in (2, 4, 5)), *calls, honest.members([1])["x/data.pkl"]]


def sentencepiece() -> list[bytes]:
    """A small BPE model."""
    pieces = [("<unk>", 2), ("<s>", 3), ("</s>", 3), ("a", 1), ("b", 1), ("ab", 1), ("▁", 1)]
    own = b"".join(
        honest.message(1, honest.message(1, one.encode()) + b"\x15" + struct.pack("<f", -i) + honest.message(3, kind))
        for i, (one, kind) in enumerate(pieces)
    )
    return [own + honest.message(2, honest.message(3, 2) + honest.message(35, 1)) + honest.message(3, b"\x18\x01")]


def packed() -> list[bytes]:
    """A run in every packing."""
    import lz4.frame  # noqa: PLC0415 - only here
    import zstandard  # noqa: PLC0415

    from tests.hostile.packed import tar  # noqa: PLC0415

    data = bytes(range(256)) * 8
    archive = tar(("x/run.pt", data, {}))
    ways: list[Callable[[bytes], bytes]] = [gzip.compress, bz2.compress, lzma.compress, lz4.frame.compress]
    ways += [zstandard.compress, lambda content: lzma.compress(content, lzma.FORMAT_ALONE), bytes]
    return [way(content) for way in ways for content in (data, archive)]


def strategies() -> list[bytes]:
    """A layout as a message."""
    dims = [honest.message(1, honest.message(1, count)) for count in (2, 4)]
    one = honest.message(1, b"a.weight") + honest.message(2, b"".join(dims) + honest.message(2, b"\x08\x00"))
    return [honest.message(3, one)]


def graphs() -> list[bytes]:
    """A graph with external data, a subgraph and a function."""
    import numpy as np  # noqa: PLC0415 - only here
    import onnx  # noqa: PLC0415
    from onnx import helper, numpy_helper  # noqa: PLC0415

    kind = onnx.TensorProto.FLOAT
    weight = onnx.TensorProto(name="w", data_type=kind, dims=[2], data_location=onnx.TensorProto.EXTERNAL)
    for key, value in (("location", "x.bin"), ("offset", "0"), ("length", "8")):
        weight.external_data.add(key=key, value=value)
    inner = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["z"])], "then", [], [helper.make_empty_tensor_value_info("z")]
    )
    function = helper.make_function(
        "f", "double", ["a"], ["b"], [helper.make_node("Add", ["a", "a"], ["b"])], [helper.make_opsetid("", 17)]
    )
    nodes = [
        helper.make_node("Add", ["x", "w"], ["s"]),
        helper.make_node("double", ["s"], ["d"], domain="f"),
        helper.make_node("ConstantOfShape", ["n"], ["zeros"]),
        helper.make_node("If", ["c"], ["y"], then_branch=inner, else_branch=inner),
    ]
    ports = [helper.make_tensor_value_info(name, kind, [2]) for name in "xy"]
    ports.insert(1, helper.make_tensor_value_info("c", onnx.TensorProto.BOOL, []))
    sizes = numpy_helper.from_array(np.array([2, 3]), "n")
    graph = helper.make_graph(nodes, "g", ports[:2], ports[2:], [weight, sizes])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("f", 1)]
    return [helper.make_model(graph, opset_imports=opsets, functions=[function]).SerializeToString()]


def unpack_file(path: Path) -> None:
    """What is packed in a file, to a file without a name."""
    with open(path, "rb") as file, tempfile.TemporaryFile(buffering=0) as target:
        codec = find_codec(file, path.name)
        file.seek(0)
        if codec or is_tar(file.read(RECORD)):
            unpack._unpack(path.name, file, codec, target)


def tensors_of(path: Path) -> None:
    """The tensors of a distributed checkpoint."""
    folder = open_folder(path.parent)
    for keys, item in named_leaves(folder.tree):
        if isinstance(item, TensorItem) and item.dtype:
            folder.tensor(str(keys), item)


def request(path: Path) -> None:
    """A request of either kind."""
    for reader in (chat_request, completion_request):
        try:
            reader(parse_json(path.read_bytes()))
        except ApiError as error:
            json.dumps(str(error)).encode()


def codes() -> bytes:
    """A file of quantized weights: blocks, columns, and a norm."""
    bytes_of = {"m.codes": (2, 2, 16), "m.zeros": (2, 1)}
    floats = {"m.scales": (2, 2), "n.scales": (2,), "norm": (3,)}
    tensors: dict[str, Any] = {name: np.zeros(shape, np.uint8) for name, shape in bytes_of.items()}
    tensors |= {name: np.zeros(shape, np.float32) for name, shape in floats.items()}
    return save({**tensors, "n.codes": np.zeros((3, 2), np.int8)})


def fields(**content: Any) -> list[bytes]:
    """A JSON object."""
    return [json.dumps(content).encode()]


OPCODES = tuple(bytes([code]) for code in b"(.0]}tulaesbRQch\x81\x85\x86\x87\x88\x8a\x8c\x8f\x90\x91\x92\x93\x94\x95")
MESSAGE = {"role": "user", "content": "hello"}
LAYOUT = {"dev_matrix": [2, 4], "tensor_map": [0, -1], "opt_weight_shard_step": 0, "opt_weight_shard_size": 0}
STEP = {"command": "to-hf", "llmconv": "0.1.0", "source": "x", "options": {}}
QUANT_STEP = {**STEP, "command": "export", "options": {"quant": "int4", "quant_block": 32, "parameters": 140}}
GRAPH = {"file": "prefill.onnx", "sha256": "0" * 64, "bytes": 8}
VERDICT = {
    "verdict": "pass",
    "method": "whole",
    "suite": "quick",
    "only": ["batch of 3"],
    "checks": {"passed": 4, "failed": 0, "skipped": 0},
    "unseen": [],
    "reference": "x",
    "versions": {"llmconv": "0.1.0"},
    "graphs": {"prefill.onnx": "0" * 64},
    "weights": {"quantized.safetensors": {"bytes": 8, "header_sha256": "0" * 64}},
}
RUN = """model:
  arch: {type: LlamaForCausalLM}
  model_config: &a {hidden_size: 4, num_layers: 1, num_heads: 2, rms_norm_eps: 1.0e-5, use_past: false}
other: *a
list: [1, 2.5, "x", null, 2001-01-01, 0x10, 1:30]
"""

TARGETS: dict[str, Target] = {
    "pickle": Target("x.pkl", pickles, lambda path: repr(read_pickle(path.read_bytes(), "x")), words=OPCODES),
    "torch": Target("x.pt", lambda: [built(composer, "x.pt")], torch_tensors, words=OPCODES),
    "old-torch": Target("x.bin", lambda: [built(old_file, "x.bin")], torch_tensors, words=OPCODES),
    "safetensors": Target("a.safetensors", lambda: [built(hugging_face, "a.safetensors")], read_header),
    "header": Target(
        "x.json",
        lambda: fields(a={"dtype": "F32", "shape": [2, 1], "data_offsets": [0, 8]}, __metadata__={"format": "pt"}),
        lambda path: _with_header(path),
    ),
    "onnx-adapter": Target("x.onnx_adapter", lambda: [encode_adapter({"a": np.ones((2, 3))})], read_adapter),
    "index": Target(
        "model.safetensors.index.json",
        lambda: [built(hugging_face, "model.safetensors.index.json")],
        lambda path: open_checkpoint(path.parent),
        lambda: others(hugging_face, "model.safetensors.index.json"),
    ),
    "config": Target(
        "config.json",
        lambda: [json.dumps({**honest.CONFIG, "quantization_config": {"quant_method": "gptq", "bits": 4}}).encode()],
        lambda path: inspect(path.parent).summary(),
        lambda: others(hugging_face, "config.json"),
    ),
    "params": Target(
        "params.json",
        lambda: [built(honest.meta, "params.json")],
        lambda path: inspect(path.parent).summary(),
        lambda: others(honest.meta, "params.json"),
    ),
    "adapter": Target(
        "adapter_config.json",
        lambda: [built(adapter, "adapter_config.json")],
        lambda path: parse_config(read_json(path)),
    ),
    "manifest": Target(
        "llmconv.json",
        lambda: fields(manifest_version=1, steps=[STEP], files={"a": {"bytes": 1}}, graphs={"prefill": GRAPH}),
        lambda path: (read_manifest(path.parent), graph_entries(path.parent)),
    ),
    "quantized-manifest": Target(
        "llmconv.json",
        lambda: fields(steps=[QUANT_STEP], files={"a": {"bytes": 1}}, graphs={"prefill": GRAPH}, verified=VERDICT),
        lambda path: inspect(path.parent).summary(),
        lambda: {"quantized.safetensors": codes()},
    ),
    "dcp": Target(
        ".metadata",
        lambda: [built(folder_of, ".metadata")],
        tensors_of,
        lambda: others(folder_of, ".metadata"),
        OPCODES,
    ),
    "megatron": Target(
        "model_optim_rng.pt",
        lambda: [built(megatron, "model_optim_rng.pt")],
        read_megatron,
        words=(*OPCODES, b"num_layers", b"kv_channels", b"num_experts", b"swiglu", b"window_size", b"linear_qkv"),
    ),
    "mindspore": Target("x.ckpt", lambda: [built(honest.mindspore, "x.ckpt")], read_ckpt),
    "paddle": Target(
        "model_state.pdparams",
        lambda: [built(honest.paddle, "model_state.pdparams")],
        lambda path: open_pdparams(path).tensors,
        words=OPCODES,
    ),
    "sentencepiece": Target("tokenizer.model", sentencepiece, lambda path: _sentencepiece(path.read_bytes())),
    "tiktoken": Target(
        "tokenizer.model",
        lambda: [b"YQ== 0\nYg== 1\nYWI= 2\n"],
        lambda path: tiktoken_json(parse_tiktoken(path.read_bytes()), since_3_1=True),
    ),
    "yaml": Target(
        "run.yaml",
        lambda: [RUN.encode()],
        read_config_file,
        words=(b"- ", b"[", b"{", b"&a ", b"*a", b"!!", b"<<: *a", b"? ", b"|\n", b"\n  ", b"!!python/name:os.system"),
    ),
    "run-config": Target(
        "run.yaml",
        lambda: [RUN.encode()],
        lambda path: inspect(path.parent / "x.ckpt").summary(),
        lambda: others(honest.mindspore, "run.yaml"),
    ),
    "strategy": Target("strategy.ckpt", strategies, read_strategy),
    "strategy-json": Target("strategy.json", lambda: fields(parallel_layout_item={"a.weight": LAYOUT}), read_strategy),
    "packed": Target("x.packed", packed, unpack_file),
    "onnx": Target("x.onnx", graphs, lambda path: weight_bytes(load_guarded(path)), lambda: {"x.bin": bytes(8)}),
    "session": Target(
        "session.json",
        lambda: [
            *fields(session={"intra_op_num_threads": 1}, provider={"name": "cpu"}, free_dimensions={"b": 1}),
            b"[session]\nintra_op_num_threads = 4\n[entries]\na.b = 0\n[free_dimensions]\nb = 1\n",
        ],
        read_session_file,
    ),
    "delta": Target(
        "delta.json",
        lambda: [built(delta, "delta.json")],
        lambda path: open_exact(path.parent),
        lambda: others(delta, "delta.json"),
    ),
    "model-code": Target(
        "own.py",
        lambda: [b"import re\nfrom . import own\nfrom .own import *\n\nclass Model(own.Base):\n    x = f'{1}', [2]\n"],
        lambda path: collect_code(path.parent, ["own.Model"]),
        words=(b"from .", b"import ", b"..", b"(", b"lambda: ", b"\n    ", b"# coding: utf-7\n", b"\\N{", b"0x"),
    ),
    "request": Target(
        "request.json",
        lambda: fields(
            model="x", messages=[MESSAGE], prompt=["a", [1]], max_tokens=3, stop=["x"], temperature=0.5, n=1
        ),
        request,
    ),
}


def _with_header(path: Path) -> None:
    """A safetensors file with this header."""
    header = path.read_bytes()
    path.with_suffix(".safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    read_header(path.with_suffix(".safetensors"))


def _sentencepiece(data: bytes) -> None:
    model = parse_sentencepiece(data)
    if model.is_bpe and min(model.bos, model.eos, model.unk) >= 0:
        json.dump(tokenizer_json(model), io.StringIO())


def run_target(target: Target, data: bytes, folder: Path) -> None:
    """Reads `data` in the place of the target's file.

    Raises:
        LlmconvError: it is refused; anything else is a fault.
    """
    path = folder / target.name
    path.write_bytes(data)
    with reading_safely(path):
        target.read(path)


__all__ = ["TARGETS", "Target", "run_target"]
