"""Importance matrices: blocks are those of llama.cpp with the same weights, and other files are refused."""

from __future__ import annotations

import hashlib
import struct
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter
from safetensors.numpy import load_file

from llmconv import to_gguf
from llmconv.convert import from_hf
from llmconv.convert.formats.gguf.quantizers import QUANTIZERS
from llmconv.convert.formats.gguf.save import MIXTURES
from llmconv.errors import InputRefused, LlmconvError, UsageProblem
from llmconv.files.gguf_file import read_gguf
from tests.conftest import save_tiny
from tests.convert.formats.test_gguf_mixtures import HOME, MODELS, ROOT, WIDE, noise, odd_rows, of_llama_cpp

Weights = Mapping[str, np.ndarray[Any, np.dtype[Any]]]
SMALL = {**WIDE, "num_hidden_layers": 2}


def importance(columns: int, experts: int = 1) -> Any:
    """Weights of columns, some of them zero and some large; float32 [experts, columns]."""
    weights = np.square(noise(experts, columns) * np.float32(1000))
    weights[:, ::7] = 0
    weights[:, 5::31] *= np.float32(1e4)
    return weights


def weights_of(file: Path, but: str = "token_embd.weight") -> Weights:
    """Weights of all matrices of a GGUF file of floats, but of one."""
    found = {}
    for name, tensor in read_gguf(file).tensors.items():
        shape = tensor.values.shape
        if len(shape) > 1 and name.endswith(".weight") and "norm" not in name and name != but:
            found[name] = importance(shape[-1], shape[0] if len(shape) > 2 else 1)
    return found


def write_matrix(file: Path, weights: Weights, count: float = 4.0, kind: str = "imatrix") -> Path:
    """The file of `llama-imatrix`; its sums are the weights times `count`."""
    writer = GGUFWriter(file, "llama")
    writer.add_string("general.type", kind)
    writer.add_array("imatrix.datasets", ["text.txt"])
    writer.add_uint32("imatrix.chunk_count", 12)
    for name, one in weights.items():
        writer.add_tensor(f"{name}.in_sum2", one * np.float32(count))
        writer.add_tensor(f"{name}.counts", np.full((len(one), 1), count, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def write_dat(file: Path, weights: Weights, calls: int = 4) -> Path:
    """The older form."""
    data = struct.pack("<i", len(weights))
    for name, one in weights.items():
        data += struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", calls, one.size)
        data += (one * np.float32(calls)).tobytes()
    file.write_bytes(data + struct.pack("<ii", 12, 8) + b"text.txt")
    return file


OF_LLAMA_CPP = {
    "Q4_0": "8fec67bfae2bbf0e",
    "Q4_1": "cc8c51cdad3aee42",
    "Q5_0": "cc571d546825677b",
    "Q5_1": "5a4acbff66d1c8e7",
    "Q4_K": "7f184cf9badb61fd",
    "Q5_K": "dcd9356f07db0bb9",
    "Q6_K": "37bd180d9372a548",
}
"""SHA-256 of llama.cpp's blocks of `odd_rows` with `importance`, the first 16 digits."""


@pytest.mark.parametrize("kind", [name for name, one in QUANTIZERS.items() if one.weighted])
def test_weighted_blocks_are_those_of_llama_cpp(kind: str) -> None:
    values, weighted = odd_rows(), QUANTIZERS[kind].weighted
    assert weighted
    made = weighted(values, np.broadcast_to(importance(2048), values.shape))
    assert hashlib.sha256(made.tobytes()).hexdigest()[:16] == OF_LLAMA_CPP[kind]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [name for name, one in QUANTIZERS.items() if one.weighted])
def test_weighted_blocks_of_any_values_are_those_of_llama_cpp(kind: str) -> None:
    if not (HOME / "complete").exists():
        pytest.skip("`benchmarks/llama_cpp.py` builds llama.cpp for `make bench`")
    random, weighted = np.random.default_rng(0), QUANTIZERS[kind].weighted
    values = random.standard_t(3, size=(256, 2048)).astype(np.float32)
    values[:13] = odd_rows()
    assert weighted
    for weights in (importance(2048), np.square(random.normal(size=(1, 2048))).astype(np.float32)):
        made = weighted(values, np.broadcast_to(weights, values.shape))
        assert np.array_equal(made, of_llama_cpp(values, kind, weights))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [name for name in MIXTURES if name != "Q8_0"])
@pytest.mark.parametrize("name", ["llama", "llama, tied", "mixtral, 8 experts", "falcon", "deepseek v2"])
def test_a_file_is_the_one_of_llama_quantize(tmp_path: Path, name: str, recipe: str) -> None:
    if not (HOME / "complete").exists():
        pytest.skip("`benchmarks/llama_cpp.py` builds llama.cpp for `make bench`")
    model = save_tiny(MODELS[name][0], tmp_path / "model", **MODELS[name][1])
    from_hf(model, tmp_path / "whole", to="gguf")
    weights = weights_of(tmp_path / "whole/model.gguf")
    matrix = write_matrix(tmp_path / "x.gguf", weights)
    arrays: dict[str, Any] = dict(weights)
    np.savez(tmp_path / "x.npz", **arrays)
    from_hf(model, tmp_path / "out", to="gguf", dtype=recipe.lower(), imatrix=matrix)
    call = "import sys; from benchmarks.gguf_file import quantize; quantize(*sys.argv[1:])"
    files = [tmp_path / "whole/model.gguf", tmp_path / "theirs.gguf"]
    command = [HOME / "bin/python", "-c", call, *files, recipe, tmp_path / "x.npz"]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    ours, theirs = (GGUFReader(file) for file in (tmp_path / "out/model.gguf", files[1]))
    types, wanted = ({one.name: one.tensor_type.name for one in file.tensors} for file in (ours, theirs))
    assert types == wanted
    data = {one.name: np.asarray(one.data) for one in theirs.tensors}
    assert [one.name for one in ours.tensors if one.data.tobytes() != data[one.name].tobytes()] == []


def test_a_matrix_of_either_form_is_used(tmp_path: Path) -> None:
    model = save_tiny("llama", tmp_path / "model", **SMALL)
    from_hf(model, tmp_path / "whole", to="gguf")
    weights = weights_of(tmp_path / "whole/model.gguf")
    files = write_matrix(tmp_path / "a.gguf", weights), write_dat(tmp_path / "a.dat", weights)
    with pytest.raises(InputRefused, match="is the importance matrix itself"):
        to_gguf(model, files[0], type="q4_k_s", imatrix=files[0], overwrite=True)
    for file in files:
        from_hf(model, tmp_path / file.suffix, to="gguf", dtype="q4_k_s", imatrix=file)
    first, second = (read_gguf(tmp_path / file.suffix / "model.gguf") for file in files)
    about = {key: one for key, one in first.metadata.items() if key.startswith("quantize.")}
    assert about == {
        "quantize.imatrix.file": "a.gguf",
        "quantize.imatrix.dataset": "text.txt",
        "quantize.imatrix.entries_count": 15,
        "quantize.imatrix.chunks_count": 12,
    }
    assert {**first.metadata, "quantize.imatrix.file": "a.dat"} == second.metadata
    for name, one in first.tensors.items():
        assert np.array_equal(one.blocks.read(), second.tensors[name].blocks.read())
    gate, quantizer = load_file(model / "model.safetensors")["model.layers.1.mlp.gate_proj.weight"], QUANTIZERS["Q4_K"]
    assert quantizer.weighted
    made = quantizer.weighted(gate, np.broadcast_to(weights["blk.1.ffn_gate.weight"], gate.shape))
    assert np.array_equal(first.tensors["blk.1.ffn_gate.weight"].blocks.read(), made.reshape(512, -1))
    assert not np.array_equal(made, quantizer.blocks(gate.reshape(-1, 256)))


def test_each_expert_has_weights_of_its_own(tmp_path: Path) -> None:
    model = save_tiny("mixtral", tmp_path / "model", **SMALL, num_local_experts=4, num_experts_per_tok=2)
    from_hf(model, tmp_path / "whole", to="gguf")
    weights = weights_of(tmp_path / "whole/model.gguf")
    matrix = write_matrix(tmp_path / "x.gguf", weights)
    from_hf(model, tmp_path / "out", to="gguf", dtype="q6_k", imatrix=matrix)
    found = read_gguf(tmp_path / "out/model.gguf").tensors["blk.0.ffn_up_exps.weight"].blocks.read()
    values = read_gguf(tmp_path / "whole/model.gguf").tensors["blk.0.ffn_up_exps.weight"].values.read()
    rows = np.repeat(weights["blk.0.ffn_up_exps.weight"], 512, axis=0)
    quantizer = QUANTIZERS["Q6_K"].weighted
    assert quantizer and np.array_equal(found, quantizer(values.reshape(-1, 256), rows).reshape(found.shape))


def test_columns_that_were_never_used_count_the_same(tmp_path: Path) -> None:
    model = save_tiny("llama", tmp_path / "model", **SMALL)
    from_hf(model, tmp_path / "whole", to="gguf")
    weights = weights_of(tmp_path / "whole/model.gguf")
    ones = {name: np.ones_like(one) for name, one in weights.items()}
    for file, given, count in (("a.gguf", weights, 0.0), ("b.gguf", ones, 1.0)):
        matrix = write_matrix(tmp_path / file, given, count)
        from_hf(model, tmp_path / file.removesuffix(".gguf"), to="gguf", dtype="q5_0", imatrix=matrix)
    first, second = (read_gguf(tmp_path / name / "model.gguf").tensors for name in "ab")
    assert all(np.array_equal(one.blocks.read(), second[name].blocks.read()) for name, one in first.items())


@pytest.mark.parametrize("write", [write_matrix, write_dat])
def test_an_expert_that_no_token_reached_is_quantized_as_without_weights(
    tmp_path: Path, write: Callable[[Path, Weights], Path]
) -> None:
    model = save_tiny("mixtral", tmp_path / "model", **SMALL, num_local_experts=4, num_experts_per_tok=2)
    from_hf(model, tmp_path / "whole", to="gguf")
    whole = read_gguf(tmp_path / "whole/model.gguf").tensors["blk.0.ffn_up_exps.weight"].values.read()
    weights = weights_of(tmp_path / "whole/model.gguf")
    for name, one in weights.items():
        if "_exps" in name:
            one[1] = 0
    from_hf(model, tmp_path / "out", to="gguf", dtype="q6_k", imatrix=write(tmp_path / "x", weights))
    found = read_gguf(tmp_path / "out/model.gguf").tensors["blk.0.ffn_up_exps.weight"].values.read()
    assert np.abs(found[1] - whole[1]).max() < 0.05 * np.abs(whole[1]).max()


def test_matrices_without_weights_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_tiny("llama", tmp_path / "model", **SMALL)
    from_hf(model, tmp_path / "whole", to="gguf")
    weights = weights_of(tmp_path / "whole/model.gguf", but="blk.1.attn_q.weight")
    matrix = write_matrix(tmp_path / "x.gguf", weights)
    from_hf(model, tmp_path / "out", to="gguf", dtype="q4_k_m", imatrix=matrix)
    assert "`x.gguf` has no weights for `blk.1.attn_q.weight`: quantized without" in capsys.readouterr().err


def _changed(name: str, change: Callable[[Any], Any]) -> Callable[[Path, Weights], Path]:
    return lambda file, weights: write_matrix(file, {**weights, name: change(weights.get(name))})


def _cut(file: Path, weights: Weights) -> Path:
    write_dat(file, weights)
    file.write_bytes(file.read_bytes()[:5000])
    return file


def _text(file: Path, _: Weights) -> Path:
    file.write_text("not a matrix, but a text of some length")
    return file


QUERY = "blk.1.attn_q.weight"
REFUSED: dict[str, tuple[Callable[[Path, Weights], Path], str]] = {
    "other layers": (_changed("blk.7.attn_q.weight", lambda _: importance(256)), r"another model, which has `blk\.7"),
    "other sizes": (_changed(QUERY, lambda _: importance(128)), "128 weights for `blk.1.attn_q.weight`, expected 256"),
    "negative": (_changed(QUERY, lambda one: -1 - one), "negative or infinite weights for `blk.1.attn_q.weight`"),
    "not numbers": (_changed(QUERY, lambda one: one * np.nan), "negative or infinite weights"),
    "other numbers": (_changed(QUERY, lambda one: one.astype(np.float64)), "no fitting counts"),
    "negative counts": (lambda file, weights: write_matrix(file, weights, -1.0), "negative or infinite counts"),
    "a model": (lambda file, weights: write_matrix(file, weights, kind="model"), "`general.type` is model"),
    "nothing": (lambda file, _: write_matrix(file, {}), "no weights for matrices of `model`"),
    "cut short": (_cut, "is truncated"),
    "a text": (_text, "is not an importance matrix of llama.cpp"),
    "no file": (lambda file, _: file, "does not exist"),
    "a folder": (lambda file, _: file.parent, "is not a file"),
}


@pytest.mark.parametrize(("write", "said"), REFUSED.values(), ids=REFUSED.keys())
def test_other_files_are_refused(
    tmp_path: Path, write: Callable[[Path, Weights], Path], said: str, small_model: tuple[Path, Weights]
) -> None:
    model, weights = small_model
    with pytest.raises(LlmconvError, match=said):
        from_hf(model, tmp_path / "out", to="gguf", dtype="q4_k_m", imatrix=write(tmp_path / "x.imatrix", weights))
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Weights]:
    """A model, and weights of its matrices; do not write into it."""
    folder = tmp_path_factory.mktemp("small")
    model = save_tiny("llama", folder / "model", **SMALL)
    from_hf(model, folder / "whole", to="gguf")
    return model, weights_of(folder / "whole/model.gguf")


def test_weights_that_overflow_are_refused(tmp_path: Path, small_model: tuple[Path, Weights]) -> None:
    model, weights = small_model
    matrix = write_matrix(tmp_path / "x.gguf", {**weights, QUERY: np.full((1, 256), 3e37, np.float32)}, 1.0)
    with pytest.raises(InputRefused, match=r"the importance of `blk\.1\.attn_q\.weight` is too large"):
        from_hf(model, tmp_path / "out", to="gguf", dtype="q6_k", imatrix=matrix)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("to", "dtype"), [("gguf", "q8_0"), ("gguf", "float16"), ("gguf", "keep"), ("meta", "keep")])
def test_formats_without_weights_are_refused(
    tmp_path: Path, small_model: tuple[Path, Weights], to: str, dtype: str
) -> None:
    matrix = write_matrix(tmp_path / "x.gguf", small_model[1])
    with pytest.raises(UsageProblem, match="does not use an importance matrix|types of GGUF that have blocks"):
        from_hf(small_model[0], tmp_path / "out", to=to, dtype=dtype, imatrix=matrix)
