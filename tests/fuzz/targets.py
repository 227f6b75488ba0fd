"""One target per parser: honest inputs to begin with, and what reads one."""

from __future__ import annotations

import io
import json
import tempfile
from pathlib import Path

import numpy as np

from llmconv.checkpoint import open_checkpoint, read_json
from llmconv.convert.adapters.lora_config import parse_config
from llmconv.convert.deltas.exact import open_exact
from llmconv.convert.formats import formats
from llmconv.convert.formats.gguf.importance import read_importance
from llmconv.convert.formats.gguf.save import _value
from llmconv.convert.formats.llama2c import read_tokenizer as read_llama2c_tokenizer
from llmconv.convert.formats.mindformers.mindspore import read_ckpt, read_strategy
from llmconv.convert.formats.paddle.read import open_pdparams
from llmconv.convert.formats.verl.ranks import join_ranks
from llmconv.convert.inspection import inspect
from llmconv.convert.models.config_file import read_config_file
from llmconv.convert.opening import open_format
from llmconv.convert.state_dicts.distributed import TensorItem, named_leaves, open_folder
from llmconv.convert.state_dicts.files import torch_tensors
from llmconv.convert.tokenizers import parse_sentencepiece, parse_tiktoken, tiktoken_json, tokenizer_json
from llmconv.errors import LlmconvError
from llmconv.files import packing
from llmconv.files.packing import RECORD, find_codec, is_tar
from llmconv.files.pickle_reader import read_pickle
from llmconv.files.safetensors_file import read_header
from llmconv.generation.images import open_image
from llmconv.generation.prompts import read_embeddings
from llmconv.model_code import collect_code
from llmconv.output.manifest import graph_entries, read_manifest
from llmconv.quantized_weights.quantized_checkpoint import FIELD, quantized_checkpoint
from llmconv.runtime.onnxruntime.guard import load_guarded, weight_bytes
from llmconv.runtime.onnxruntime.lora_names import encode_adapter, read_adapter
from llmconv.runtime.onnxruntime.session_file import read_session_file
from llmconv.serve.embeddings import embedding_request
from llmconv.serve.fields import ApiError
from llmconv.serve.openai_schema import chat_request, completion_request, parse_json
from llmconv.serve.responses import response_request
from llmconv.tensors import LazyTensor
from llmconv.verify.compressed.folder import _scheme, is_compressed
from tests.builders.rank_saves import FIXTURES
from tests.fuzz.seeds import (
    GGUF_WORDS,
    GRAPH,
    IMPORTANCE,
    LAYOUT,
    MESSAGE,
    NEOX_WORDS,
    OPCODES,
    QUANT_STEP,
    RUN,
    STEP,
    VERDICT,
    adapter,
    arrays,
    code_folders,
    codes,
    composer,
    delta,
    fields,
    gguf_families,
    gguf_keys,
    ggufs,
    graphs,
    hugging_face,
    images,
    importances,
    llama2c_files,
    megatron,
    neox_files,
    old_file,
    one_tensor,
    packed,
    pickles,
    sentencepiece,
    strategies,
    with_codes,
    with_keys,
    with_neox,
)
from tests.fuzz.target import Target, built, others, run_target
from tests.hostile import honest, ranks
from tests.hostile.dcp import folder_of


def read_megatron(path: Path) -> None:
    """The model in the file of a rank, with the size of its vocabulary."""
    formats()["megatron"].open(path, {"vocab_size": 30}, None)


def _open_gguf(path: Path) -> None:
    """The model in a GGUF file, and its tensors."""
    if not formats()["gguf"].detect(path):
        return
    opened = open_format(formats()["gguf"], path, path.name, {}, None)
    json.dumps(opened.config, allow_nan=False)
    for tensor in opened.tensors.values():
        tensor.read()


def _open_llama2c(path: Path) -> None:
    """The model in a `.bin` file of llama2.c, and its tensors."""
    found = formats()["llama2c"]
    if found.detect(path):
        for tensor in open_format(found, path, path.name, {}, None).tensors.values():
            tensor.read()


def _open_neox(path: Path) -> None:
    """The genuine run in GPT-NeoX's names with another file, and its tensors."""
    for tensor in open_format(formats()["neox"], with_neox(path), "run", {}, None).tensors.values():
        tensor.read()


def _read_importance(path: Path) -> None:
    """The weights in an importance matrix, and what a file that was quantized with it says."""
    found = read_importance(path, IMPORTANCE, "model")
    assert all(np.isfinite(one).all() and (one >= 0).all() for one in found.weights.values())
    for one in found.metadata.values():
        _value(one)


def _read_codes(folder: Path) -> None:
    """The values of a quantized folder, and which scheme of `quantize` it has."""
    found = quantized_checkpoint(open_checkpoint(folder))
    for tensor in found.plain.values() if found else ():
        tensor.read()
    inspect(folder).summary()
    if found and is_compressed(folder):
        _scheme(folder, found.stored.config[FIELD], None)


def unpack_file(path: Path) -> None:
    """What is packed in a file, to a file without a name."""
    with open(path, "rb") as file, tempfile.TemporaryFile(buffering=0) as target:
        codec = find_codec(file, path)
        file.seek(0)
        if codec or is_tar(file.read(RECORD)):
            packing._unpack(path.name, file, codec, target)


def tensors_of(path: Path) -> None:
    """The tensors of a distributed checkpoint."""
    folder = open_folder(path.parent)
    for keys, item in named_leaves(folder.tree):
        if isinstance(item, TensorItem) and item.dtype:
            folder.tensor(str(keys), item)


def pickle_of(run: str) -> bytes:
    """The pickle of rank 1 of a genuine run."""
    return ranks.members_of(ranks.rank_file(FIXTURES / run, 1))["x/data.pkl"]


def read_ranks(path: Path) -> None:
    """The tensors of each genuine run, with this pickle in the file of rank 1."""
    problems = []
    for run in (ranks.MESH, ranks.GROUP, ranks.GRID):
        files = {rank: file for rank, file in enumerate(sorted((FIXTURES / run).glob("model_*.pt")))}
        parts = ranks.members_of(files[1]) | {"x/data.pkl": path.read_bytes()}
        try:
            joined = join_ranks("x", files | {1: honest.repacked(path.parent, parts)})
            for tensor in joined.values():
                if isinstance(tensor, LazyTensor):
                    tensor.read()
        except LlmconvError as problem:
            problems.append(problem)
    if len(problems) == 3:
        raise problems[-1]


def request(path: Path) -> None:
    """A request of any endpoint."""
    for reader in (chat_request, completion_request, response_request, embedding_request):
        try:
            reader(parse_json(path.read_bytes()))
        except ApiError as error:
            json.dumps(str(error)).encode()


TARGETS: dict[str, Target] = {
    "pickle": Target("x.pkl", pickles, lambda path: repr(read_pickle(path.read_bytes(), "x")), words=OPCODES),
    "torch": Target("x.pt", lambda: [built(composer, "x.pt")], torch_tensors, words=OPCODES),
    "old-torch": Target("x.bin", lambda: [built(old_file, "x.bin")], torch_tensors, words=OPCODES),
    "safetensors": Target("a.safetensors", lambda: [built(hugging_face, "a.safetensors")], read_header),
    "gguf": Target("x.gguf", ggufs, _open_gguf, words=GGUF_WORDS),
    "gguf-keys": Target("x.json", gguf_keys, lambda path: _open_gguf(with_keys(path)), refused=gguf_families),
    "llama2c": Target(
        "x.bin", llama2c_files, _open_llama2c, words=(b"24ka", *(bytes([n, 0, 0, 0]) for n in (1, 2, 16)))
    ),
    "llama2c-tokens": Target(
        "tokenizer.bin",
        lambda: [(FIXTURES.parent / "llama2c" / "grouped_untied_compiled" / "tokenizer.bin").read_bytes()],
        read_llama2c_tokenizer,
    ),
    "neox": Target(
        "layer_02-model_00-model_states.pt",
        lambda: neox_files("layer_02-model_00-model_states.pt"),
        _open_neox,
        words=OPCODES,
    ),
    "neox-config": Target("m.yml", lambda: neox_files("configs/m.yml"), _open_neox, words=NEOX_WORDS),
    "quantized-folder": Target("x.json", code_folders, lambda path: _read_codes(with_codes(path))),
    "importance": Target("x.imatrix", importances, _read_importance, words=GGUF_WORDS),
    "header": Target(
        "x.json",
        lambda: fields(a={"dtype": "F32", "shape": [2, 1], "data_offsets": [0, 8]}, __metadata__={"format": "pt"}),
        lambda path: _with_header(path),
    ),
    "npy": Target(
        "x.npy", arrays, read_embeddings, words=(b"\x93NUMPY\x01\x00", b"'<f4'", b"|O", b"True", b"(3, 2), ")
    ),
    "embeddings": Target("x.safetensors", one_tensor, read_embeddings),
    "image": Target(
        "x.png", images, open_image, words=(b"IHDR", b"IDAT", b"eXIf", b"tRNS", b"\xff\xd8\xff", b"\xff\xe1")
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
    "ranks": Target(
        "data.pkl",
        lambda: [pickle_of(run) for run in (ranks.MESH, ranks.GROUP, ranks.GRID)],
        read_ranks,
        words=(
            *OPCODES,
            b"placement_types\nShard\n",
            b"K\x00",
            b"K\x02\x85",
            b"split_factor",
            b"shard_offsets",
            b"shape",
        ),
    ),
    "mindspore": Target("x.ckpt", lambda: [built(honest.mindspore, "x.ckpt")], read_ckpt),
    "paddle": Target(
        "model_state.pdparams",
        lambda: [built(honest.paddle, "model_state.pdparams")],
        lambda path: open_pdparams(path),
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
            b"[session]\nintra_op_num_threads = 4\n[entries]\nmlas.use_lut_gemm = 0\n[free_dimensions]\nb = 1\n",
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


__all__ = ["TARGETS", "Target", "run_target"]
