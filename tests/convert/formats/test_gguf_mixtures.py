"""Mixtures of types of GGUF: blocks and types are llama.cpp's, and values stay within the steps of their types."""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from benchmarks import environments
from llmconv.cli.from_hf import GGUF_MIXTURES
from llmconv.convert import from_hf, to_hf
from llmconv.convert.formats.gguf.quantizers import QUANTIZERS
from llmconv.convert.formats.gguf.recipes import types_of
from llmconv.convert.formats.gguf.save import MIXTURES
from llmconv.errors import InputRefused
from llmconv.files.gguf_file import BLOCKS, read_gguf
from tests.conftest import DECODER, save_tiny
from tests.convert.formats.test_gguf_families import ALTERNATING, LATENT

ROOT = Path(__file__).parents[3]
HOME = ROOT / environments.folder("llama.cpp")
NUMBERS = {block.name: number for number, block in BLOCKS.items()}
WIDE: dict[str, Any] = {**DECODER, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 9}
LARGE: dict[str, Any] = {**WIDE, "intermediate_size": 32, "num_hidden_layers": 80}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", WIDE),
    "llama, tied": ("llama", {**WIDE, "tie_word_embeddings": True}),
    "llama, odd rows": ("llama", {**WIDE, "hidden_size": 224, "intermediate_size": 272}),
    "llama, 80 layers": ("llama", {**LARGE, "head_dim": 16}),
    "llama, 80 layers of own keys": ("llama", {**LARGE, "head_dim": 16, "num_key_value_heads": 4}),
    "qwen2, 80 layers": ("qwen2", LARGE),
    "mixtral, 4 experts": ("mixtral", {**WIDE, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral, 8 experts": ("mixtral", {**WIDE, "num_local_experts": 8, "num_experts_per_tok": 2}),
    "phi3": ("phi3", {**WIDE, "original_max_position_embeddings": 128}),
    "gpt2": ("gpt2", {"vocab_size": 96, "n_embd": 256, "n_layer": 9, "n_head": 4, "n_positions": 128}),
    "falcon": (
        "falcon",
        {
            "vocab_size": 96,
            "hidden_size": 256,
            "num_hidden_layers": 17,
            "num_attention_heads": 4,
            "bias": False,
            "ffn_hidden_size": 512,
            "new_decoder_architecture": False,
            "multi_query": True,
        },
    ),
    "lfm2": ("lfm2", {**WIDE, "full_attn_idxs": [1, 3, 4, 7], "block_auto_adjust_ff_dim": False}),
    "gpt-oss": ("gpt_oss", {**ALTERNATING, "hidden_size": 256, "intermediate_size": 256}),
    "deepseek v2": ("deepseek_v2", {**LATENT, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 9}),
}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", MIXTURES)
@pytest.mark.parametrize("name", MODELS)
def test_a_file_is_the_one_of_llama_quantize(tmp_path: Path, name: str, recipe: str) -> None:
    if not (HOME / "complete").exists():
        pytest.skip("`benchmarks/llama_cpp.py` builds llama.cpp for `make bench`")
    model = save_tiny(MODELS[name][0], tmp_path / "model", **MODELS[name][1])
    from_hf(model, tmp_path / "whole", to="gguf")
    from_hf(model, tmp_path / "out", to="gguf", dtype=recipe.lower())
    call = "import sys; from benchmarks.gguf_file import quantize; quantize(*sys.argv[1:])"
    files = [tmp_path / "whole/model.gguf", tmp_path / "theirs.gguf"]
    command = [HOME / "bin/python", "-c", call, *files, recipe]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, cwd=ROOT)
    ours = GGUFReader(tmp_path / "out/model.gguf")
    if done.returncode and "no tensor type fallback is defined" in done.stderr:  # llama.cpp has none; here float16
        assert any(one.tensor_type == GGMLQuantizationType.F16 for one in ours.tensors)
        return
    assert done.returncode == 0, done.stderr[-2000:]
    theirs = GGUFReader(tmp_path / "theirs.gguf")
    types, wanted = ({one.name: one.tensor_type.name for one in file.tensors} for file in (ours, theirs))
    assert types == wanted
    data = {one.name: np.asarray(one.data) for one in theirs.tensors}
    assert [one.name for one in ours.tensors if one.data.tobytes() != data[one.name].tobytes()] == []
    assert ours.fields["general.file_type"].contents() == theirs.fields["general.file_type"].contents()


def noise(rows: int, columns: int) -> Any:
    """Values of a sum of four uniform ones, the same on every machine; float32 [rows, columns], most below 0.02."""
    state = np.arange(4 * rows * columns, dtype=np.uint64) * np.uint64(2654435761) + np.uint64(12345)
    state = (state ^ state >> np.uint64(15)) * np.uint64(2246822519) & np.uint64(0xFFFFFFFF)
    parts = (state >> np.uint64(8)).astype(np.float32).reshape(4, rows, columns)
    return parts.sum(axis=0) / np.float32(1 << 30) - np.float32(0.03125)


def odd_rows() -> Any:
    """Noise, zeros, constants, halves, tiny and large values, and small differences far from zero; [13, 2048]."""
    values = noise(13, 2048)
    values[1] = 0
    values[2, ::3] = 0
    values[3], values[4] = 0.7, -0.7
    values[5] = np.round(values[5] * 200) / 2
    values[6] *= 1e-6
    values[7] *= 1e-14
    values[8, ::2] *= 1e-7
    values[9] += 100
    values[10] -= 100
    values[11] *= 1e6
    values[12] = np.where(values[12] > 0, -0.0, 0.0)
    return values


def blocks_of(values: Any, kind: str) -> Any:
    return QUANTIZERS[kind].blocks(values.reshape(-1, BLOCKS[NUMBERS[kind]].elements))


OF_LLAMA_CPP = {
    "Q8_0": "77f854124b263202",
    "Q4_0": "51a345f8fdde2652",
    "Q4_1": "5273c2414d20502c",
    "Q5_0": "66007a8ff35f44a0",
    "Q5_1": "a1ed0b6fc7ae6c0b",
    "Q4_K": "a72358035c3d3514",
    "Q5_K": "e48cf004c089906e",
    "Q6_K": "45cb8e93488a7e70",
}
"""SHA-256 of llama.cpp's blocks (`ggml_quantize_chunk`, llama-cpp-python 0.3.36) of `odd_rows`, the first 16 digits."""


def of_llama_cpp(values: Any, kind: str, weights: Any = None) -> Any:
    """Blocks of llama.cpp itself, with the importance of columns if given."""
    (path,) = HOME.glob("lib/python*/site-packages/llama_cpp/lib/libggml-base.so")
    function = ctypes.CDLL(str(path)).ggml_quantize_chunk
    integer, pointer = ctypes.c_int64, ctypes.c_void_p
    function.restype, function.argtypes = ctypes.c_size_t, [ctypes.c_int, pointer, pointer, *[integer] * 3, pointer]
    made = np.empty((values.size // BLOCKS[NUMBERS[kind]].elements, BLOCKS[NUMBERS[kind]].width), np.uint8)
    given = None if weights is None else weights.ctypes.data
    written = function(NUMBERS[kind], values.ctypes.data, made.ctypes.data, 0, *values.shape, given)
    assert written == made.nbytes
    return made


@pytest.mark.parametrize("kind", QUANTIZERS)
def test_blocks_are_those_of_llama_cpp(kind: str) -> None:
    assert hashlib.sha256(blocks_of(odd_rows(), kind).tobytes()).hexdigest()[:16] == OF_LLAMA_CPP[kind]


@pytest.mark.slow
@pytest.mark.parametrize("kind", QUANTIZERS)
def test_blocks_of_any_values_are_those_of_llama_cpp_or_zeros(kind: str) -> None:
    if not (HOME / "complete").exists():
        pytest.skip("`benchmarks/llama_cpp.py` builds llama.cpp for `make bench`")
    random, block = np.random.default_rng(0), BLOCKS[NUMBERS[kind]]
    values = random.standard_t(3, size=(512, 2048)).astype(np.float32)
    values[:64] *= np.logspace(-44, 2, 64, dtype=np.float32)[:, None]  # to below the least of float16 and float32
    values[64:96] = odd_rows()[random.integers(0, 13, 32)]
    values[96:128] = values[96:128] * np.float32(1e-7) + random.choice([1, -1, 100, -100], (32, 1))
    ours, theirs = blocks_of(values, kind), of_llama_cpp(values, kind)
    other = (ours != theirs).any(axis=1)
    assert (np.abs(values.reshape(-1, block.elements)[other]) < 1e-35).all()
    assert not block.values(ours)[other].any() and not block.values(theirs)[other].any()


def steps(blocks: Any, kind: str) -> Any:
    """The largest distance between neighboring values of each block, [blocks, 1]."""
    scales = BLOCKS[NUMBERS[kind]].parts(blocks)[1]
    return np.abs(scales).max(axis=1, keepdims=True)


@pytest.mark.quick_rows("Q4_0", "Q5_K", "Q6_K")
@pytest.mark.parametrize("kind", QUANTIZERS)
@given(exponent=st.integers(-4, 9), seed=st.integers(0, 100), shift=st.floats(-1, 1))
def test_a_block_reads_back_to_within_its_steps(kind: str, exponent: int, seed: int, shift: float) -> None:
    block = BLOCKS[NUMBERS[kind]]
    values = np.random.default_rng(seed).uniform(-1, 1, (8, block.elements)).astype(np.float32)
    values = (values + np.float32(shift)) * np.float32(2.0**exponent)
    made = QUANTIZERS[kind].blocks(values)
    errors = np.abs(block.values(made) - values)
    assert (errors <= 1.5 * steps(made, kind)).all()
    assert (np.square(errors).mean(axis=1, keepdims=True) <= np.square(0.5 * steps(made, kind))).all()


@pytest.mark.parametrize("kind", QUANTIZERS)
def test_zeros_stay_zeros_and_constants_nearly_the_same(kind: str) -> None:
    values = np.repeat(np.array([0, 1, -1, 65504, 1e-30], np.float32), 256).reshape(5, 256)
    found = BLOCKS[NUMBERS[kind]].values(blocks_of(values, kind)).reshape(5, 256)
    assert (found[[0, 4]] == 0).all()
    assert np.abs(found[1:4] / values[1:4] - 1).max() < 2e-3


@pytest.mark.parametrize("kind", QUANTIZERS)
def test_the_largest_values_have_finite_scales(kind: str) -> None:
    values = np.array([-1, 1, 0.5], np.float32)[np.arange(1024) % 3] * np.float32(QUANTIZERS[kind].limit)
    found = BLOCKS[NUMBERS[kind]].values(blocks_of(values, kind)).reshape(-1)
    assert np.abs(found / values - 1).max() < 0.2


@pytest.mark.quick_rows("nan")
@pytest.mark.parametrize("value", [np.nan, np.inf, -1e6])
def test_what_is_too_large_for_a_block_is_refused(tmp_path: Path, value: float) -> None:
    model = save_tiny("llama", tmp_path / "model", **{**WIDE, "num_hidden_layers": 1})
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.0.self_attn.q_proj.weight"][3, 5] = value
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputRefused, match=r"attn_q\.weight` contains .*, too large for .* a Q4_K block"):
        from_hf(model, tmp_path / "out", to="gguf", dtype="q4_k_m")
    assert not (tmp_path / "out").exists()


def test_a_mixture_is_written_and_comes_back(tmp_path: Path) -> None:
    model = save_tiny("llama", tmp_path / "model", **{**WIDE, "num_hidden_layers": 3, "intermediate_size": 288})
    from_hf(model, tmp_path / "out", to="gguf", dtype="q4_k_m")
    stored = read_gguf(tmp_path / "out/model.gguf")
    types = {name.removesuffix(".weight"): one.type for name, one in stored.tensors.items()}
    assert stored.metadata["general.file_type"] == 15
    assert [types[name] for name in ("output", "token_embd", "output_norm")] == ["Q6_K", "Q4_K", "F32"]
    assert [types[f"blk.{layer}.attn_v"] for layer in range(3)] == ["Q4_K", "Q4_K", "Q6_K"]
    assert [types[f"blk.{layer}.ffn_down"] for layer in range(3)] == ["Q5_0", "Q5_0", "Q8_0"]
    to_hf(tmp_path / "out", tmp_path / "back")
    before, after = (load_file(folder / "model.safetensors") for folder in (model, tmp_path / "back"))
    assert before.keys() == after.keys()
    for name, values in before.items():
        assert np.square(after[name] - values).mean() <= 0.01 * np.square(values).mean(), name
    gate = "model.layers.1.mlp.gate_proj.weight"
    assert np.array_equal(after[gate], BLOCKS[12].values(blocks_of(before[gate], "Q4_K")).reshape(before[gate].shape))


def test_a_matrix_of_many_parts_has_the_blocks_of_one(tmp_path: Path) -> None:
    model = save_tiny("llama", tmp_path / "model", **{**DECODER, "vocab_size": 35000, "num_hidden_layers": 1})
    from_hf(model, tmp_path / "out", to="gguf", dtype="q5_1")
    stored = {one.name: one for one in GGUFReader(tmp_path / "out/model.gguf").tensors}
    values = load_file(model / "model.safetensors")["model.embed_tokens.weight"]
    assert np.array_equal(stored["token_embd.weight"].data.reshape(-1, 24), blocks_of(values, "Q5_1"))


def test_the_command_offers_every_mixture() -> None:
    assert [name.upper() for name in GGUF_MIXTURES] == [*MIXTURES]


DOWN, OUT, KEYS = ("blk.{}.ffn_down.weight", "blk.{}.attn_output.weight", "blk.{}.attn_k.weight")


@pytest.mark.parametrize(
    ("recipe", "architecture", "keys", "name", "expected"),
    [
        ("Q4_K_M", "llama", {}, DOWN, "6644644644644666"),
        ("Q5_K_M", "llama", {}, DOWN, "6655655655655666"),
        ("Q4_K_S", "llama", {}, DOWN, "5544444444444444"),
        ("Q4_K_M", "falcon", {}, DOWN, "6544544544544555"),
        ("Q4_K_S", "falcon", {}, DOWN, "4444444444444444"),
        ("Q4_K_M", "llama", {"expert_count": 8}, OUT, "5" * 16),
        ("Q4_K_M", "falcon", {"expert_count": 8}, OUT, "4" * 16),
        ("Q4_K_M", "llama", {"expert_count": 8}, KEYS, "8" * 16),
        ("Q6_K", "llama", {"expert_count": 4}, KEYS, "6" * 16),
    ],
)
def test_types_of_layers(recipe: str, architecture: str, keys: dict[str, Any], name: str, expected: str) -> None:
    columns = {name.format(layer): 512 for layer in (*range(8, 16), *range(8))}
    sizes = {"block_count": 16, "attention.head_count": 8, **keys}
    found = types_of(columns, recipe, architecture, sizes, tied=False)
    assert "".join(found[name.format(layer)][1] for layer in range(16)) == expected
    assert [*found] == [*columns]


@pytest.mark.parametrize(
    ("recipe", "columns", "tied", "expected"),
    [
        ("Q4_K_M", 512, True, ["Q6_K", "Q4_K"]),
        ("Q4_K_M", 512, False, ["Q4_K", "Q4_K"]),
        ("Q4_K_M", 96, True, ["Q8_0", "Q5_0"]),
        ("Q5_K_S", 96, False, ["Q5_1", "Q5_1"]),
        ("Q6_K", 96, False, ["Q8_0", "Q8_0"]),
        ("Q4_0", 96, True, ["Q8_0", "Q4_0"]),
        ("Q4_0", 512, True, ["Q6_K", "Q4_0"]),
        ("Q8_0", 512, True, ["Q8_0", "Q8_0"]),
        ("Q4_K_M", 40, True, ["F16", "F16"]),
        ("Q5_1", 40, False, ["F16", "F16"]),
    ],
)
def test_types_of_the_head_and_of_odd_rows(recipe: str, columns: int, tied: bool, expected: list[str]) -> None:
    sizes = {"block_count": 16, "attention.head_count": 8}
    names = {"token_embd.weight": columns, "blk.3.attn_q.weight": columns}
    assert [*types_of(names, recipe, "llama", sizes, tied=tied).values()] == expected
