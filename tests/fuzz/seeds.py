"""Honest inputs of the targets: small files of every format, and values in them."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import pickle
import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from llmconv.checkpoint import read_json
from llmconv.compressed.rounding import SharedPeak
from llmconv.compressed.schemes import BASE_FORMATS, SCHEMES, IntegerOptions, Weight, scheme_of
from llmconv.tensors import BY_CODE, BY_NAME, in_memory
from tests.builders.torch_states import FIXTURES
from tests.hostile import adapters, deltas, gguf, honest, legacy
from tests.hostile.pickles import PYTHON, call, text


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


def ggufs() -> list[bytes]:
    """GGUF files of a Llama with either tokenizer, and of a Mixtral."""
    return [gguf.gguf(), gguf.gguf(gguf.PIECES), gguf.gguf({**EXPERTS, **gguf.PIECES}, gguf.mixtral())]


def llama2c_files() -> list[bytes]:
    """Genuine `.bin` files of llama2.c of every version."""
    names = ("tied/v0.bin", "tied/v1.bin", "codes_untied/model.bin")
    return [(FIXTURES / "llama2c" / name).read_bytes() for name in names]


def neox_files(name: str) -> list[bytes]:
    """A file of the genuine run in GPT-NeoX's names."""
    return [(FIXTURES / "neox" / "run" / "global_step7" / name).read_bytes()]


def with_neox(path: Path) -> Path:
    """The run with one file of another content, in the folder of that file."""
    source, folder = FIXTURES / "neox" / "run", path.parent / "run"
    for file in (one for one in source.rglob("*") if one.is_file()):
        copy = folder / file.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes((path if file.name == path.name else file).read_bytes())
    return folder


NEOX_WORDS = (
    b"norm: rmsnorm",
    b"activation: swiglu",
    b"num-kv-heads: 1",
    b"gpt_j_residual: true",
    b"model-parallel-size: 2",
)


IMPORTANCE = {"blk.0.attn_q.weight": (4, 4), "blk.0.ffn_up_exps.weight": (2, 3, 4)}  # shapes of matrices


def importances() -> list[bytes]:
    """Importance matrices of llama.cpp of matrices of `IMPORTANCE`, in both forms."""
    keys = {"general.type": "imatrix", "imatrix.datasets": ["a.txt"], "imatrix.chunk_count": 3}
    sums = {
        f"{name}.in_sum2": np.ones((shape[0] if len(shape) > 2 else 1, 4), "f4") for name, shape in IMPORTANCE.items()
    }
    counts = {name.replace("in_sum2", "counts"): np.full((len(one), 1), 2, "f4") for name, one in sums.items()}
    nothing = dict.fromkeys(gguf.KEYS), dict.fromkeys(gguf.arrays())
    data = struct.pack("<i", len(sums))
    for name, one in sums.items():
        data += struct.pack("<i", len(name) - 8) + name[:-8].encode() + struct.pack("<ii", 2, one.size) + one.tobytes()
    return [
        gguf.gguf({**nothing[0], **keys}, {**nothing[1], **sums, **counts}),
        data + struct.pack("<ii", 3, 5) + b"a.txt",
    ]


EXPERTS = {"llama.expert_count": 2, "llama.expert_used_count": 1}
GGUF_WORDS = (*(name.encode() for name in gguf.KEYS), *(gguf.value(one) for one in (0, 1, 0.5, True, "x", ["a", "b"])))


def gguf_keys() -> list[bytes]:
    """What `with_keys` makes GGUF files of: their metadata, and shapes of more tensors."""
    plain = {name: one.tolist() if isinstance(one, np.ndarray) else one for name, one in gguf.KEYS.items()}
    shapes = {name: list(one.shape) for name, one in gguf.mixtral().items() if one is not None}
    pieces = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [0.0] * 8, "tokenizer.ggml.unknown_token_id": 2}
    rope = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0, "llama.rope.freq_base": 10.0}
    rope |= {"llama.rope.scaling.original_context_length": 8}
    size = {"llama.attention.key_length": 2, "llama.attention.value_length": 2, "llama.rope.dimension_count": 2}
    return [
        *fields(keys={**plain, **size, "llama.attention.head_count_kv": [2, 2]}, tensors={}),
        *fields(keys={**plain, **pieces, **rope}, tensors={}),
        *fields(keys={**plain, **EXPERTS, **size}, tensors=shapes),
        *fields(keys=plain, tensors={gguf.FREQUENCIES: [1]}),
    ]


def gguf_families() -> list[bytes]:
    """The same of other architectures, with tensors of a Llama that these do not have, so that all are refused."""
    plain = {name: one.tolist() if isinstance(one, np.ndarray) else one for name, one in gguf.KEYS.items()}
    experts = {f"blk.0.ffn_{one}_exps.weight": [2, 4, 4] for one in ("gate", "up", "down")}
    latent = {"blk.0.attn_k_b.weight": [2, 4, 2], "blk.0.attn_v_b.weight": [2, 2, 4]}
    return [
        *fields(keys=_named(plain, "gpt-oss", gguf.ALTERNATING), tensors=experts),
        *fields(keys=_named(plain, "deepseek2", gguf.LATENT), tensors=latent),
        *fields(keys=_named(plain, "lfm2", {"attention__head_count_kv": [2], "shortconv__l_cache": 3}), tensors={}),
    ]


def _named(keys: Mapping[str, Any], architecture: str, more: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of a Llama as those of another architecture, and more of them; `__` stands for a dot."""
    renamed = {name.replace("llama.", f"{architecture}."): one for name, one in keys.items()}
    own = {f"{architecture}.{name.replace('__', '.')}": one for name, one in more.items()}
    return {**renamed, **own, "general.architecture": architecture}


def with_keys(path: Path) -> Path:
    """The GGUF file of a JSON file, next to it."""
    content = read_json(path)
    keys, shapes = content.get("keys"), content.get("tensors")
    more = {name: _ones(shape) for name, shape in shapes.items()} if isinstance(shapes, dict) else {}
    values = {name: _gguf_value(one) for name, one in keys.items()} if isinstance(keys, dict) else {}
    missing = {name: None for name in gguf.KEYS if name not in values}
    dense = gguf.dense(None) if any("exps" in name for name in more) else {}
    path.with_suffix(".gguf").write_bytes(gguf.gguf({**missing, **values}, {**dense, **more}))
    return path.with_suffix(".gguf")


def _ones(shape: Any) -> Any:
    sizes = [size % 9 for size in shape if isinstance(size, int)] if isinstance(shape, list) else []
    return np.ones(sizes[:5], np.float32)


def _gguf_value(content: Any) -> bytes:
    """A value of JSON with its type."""
    if isinstance(content, bool | str):
        return gguf.value(content)
    if isinstance(content, int):
        return struct.pack("<IQ", gguf.U64, content % (1 << 64)) if abs(content) >> 31 else gguf.value(content)
    if isinstance(content, float):
        return struct.pack("<Id", gguf.F64, content) if abs(content) > 1e30 else gguf.value(content)
    if not isinstance(content, list):
        return struct.pack("<I", 13)
    items = [_gguf_value(one) for one in content]
    kinds = {item[:4] for item in items}
    return gguf.array(
        int.from_bytes(max(kinds, default=bytes(4)), "little"), len(items), b"".join(i[4:] for i in items)
    )


UP = "model.layers.0.mlp.up_proj.weight"
CODES: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in SCHEMES]
CODES += [("w4a16", {"base_format": form}) for form in BASE_FORMATS]


def code_folders() -> list[bytes]:
    """What `with_codes` makes quantized folders of: `config.json`, and dtype, shape and first numbers of tensors."""
    matrix = in_memory(np.ones((128, 256), BY_NAME["bfloat16"].numpy), BY_NAME["bfloat16"])
    found = []
    for name, options in CODES:
        scheme = scheme_of(name, IntegerOptions(**options))
        parts = scheme.parts(Weight(UP, matrix, SharedPeak([(UP, matrix)])))
        tensors = {name: [one.dtype.code, [*one.shape], one.read().ravel()[:2].tolist()] for name, one in parts.items()}
        tensors["model.norm.weight"] = ["BF16", [256], [1.0]]
        config = {**honest.CONFIG, "quantization_config": scheme.settings(["lm_head", "model.layers.0.mlp.gate"])}
        found += fields(config=config, tensors=tensors)
    return found


def with_codes(path: Path) -> Path:
    """The folder of a JSON file, within its own; numbers are repeated to the size of a tensor."""
    content, folder = read_json(path), path.parent / "codes"
    folder.mkdir(exist_ok=True)
    tensors, header, data = content.get("tensors"), dict[str, Any](), b""
    for name, entry in tensors.items() if isinstance(tensors, dict) else ():
        dtype, shape, numbers = entry if isinstance(entry, list) and len(entry) == 3 else [*[entry] * 3]
        known = BY_CODE.get(dtype) if isinstance(dtype, str) else None
        sizes = (
            [size for size in shape if isinstance(size, int) and 0 <= size < 1000] if isinstance(shape, list) else []
        )
        count = min(prod(sizes), 1 << 17)
        try:
            values = np.resize(np.array(numbers, (known or BY_NAME["uint8"]).numpy), count).tobytes()
        except (TypeError, ValueError, OverflowError):
            values = bytes(count)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(values)]}
        data += values
    raw = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + data)
    (folder / "config.json").write_text(json.dumps(content.get("config")))
    return folder


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


def codes() -> bytes:
    """A file of quantized weights: blocks, columns, and a norm."""
    bytes_of = {"m.codes": (2, 2, 16), "m.zeros": (2, 1)}
    floats = {"m.scales": (2, 2), "n.scales": (2,), "norm": (3,)}
    tensors: dict[str, Any] = {name: np.zeros(shape, np.uint8) for name, shape in bytes_of.items()}
    tensors |= {name: np.zeros(shape, np.float32) for name, shape in floats.items()}
    return save({**tensors, "n.codes": np.zeros((3, 2), np.int8)})


def arrays() -> list[bytes]:
    """Embeddings as `.npy`, in several types and orders."""
    rows = np.arange(6, dtype=np.float32).reshape(3, 2)
    return [_npy(kind) for kind in (rows, rows.astype(np.float16), rows.astype(">f8"), np.asfortranarray(rows))]


def _npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def one_tensor() -> list[bytes]:
    """Embeddings as safetensors."""
    return [save({"x": np.ones((3, 2), dtype)}) for dtype in (np.float32, np.float16)]


def images() -> list[bytes]:
    """A small image in every format and some modes."""
    from PIL import Image  # noqa: PLC0415 - only here

    exif = Image.Exif()
    exif[0x0112] = 6
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (5, 7, 4), dtype=np.uint8))
    colors, palette = image.convert("RGB"), image.convert("RGB").quantize(16)
    made = [_image(image, form) for form in ("PNG", "WEBP")]
    made += [_image(colors, form, exif=exif) for form in ("JPEG", "PNG", "WEBP")]
    made += [_image(colors.convert("CMYK"), "JPEG"), _image(colors, "JPEG", progressive=True)]
    made += [_image(palette, form, transparency=3) for form in ("PNG", "GIF")]
    made += [_image(palette, "GIF", save_all=True, append_images=[palette.rotate(180)])]
    return made + [_image(one, "BMP") for one in (colors, palette, colors.convert("1"))]


def _image(image: Any, form: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


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
