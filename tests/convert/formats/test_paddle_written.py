"""from-hf --to paddle: what PaddleNLP wrote comes back array by array, and any model that it can hold bit for bit."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmconv.checkpoint import open_checkpoint
from llmconv.convert.formats import formats
from llmconv.convert.formats.paddle.read import open_pdparams, pdparams_pieces
from llmconv.convert.from_hugging_face import from_hf
from llmconv.convert.opening import open_training
from llmconv.convert.to_hugging_face import to_hf
from llmconv.errors import InputRefused, MalformedInput, UnsupportedInput, UsageProblem
from llmconv.tensors import BY_NAME, LazyTensor, in_memory
from tests.builders.paddle_models import FIXTURES
from tests.builders.tiny_models import contents, identity, save_tiny

TABLE = "StructuredToParameterName@@"
GENUINE = {
    "llama_gqa_fp32": ("", 1),
    "tp2_llama": ("sharded", 2),
    "qwen2": ("", 1),
    "bloom": ("", 1),
    "gpt3": ("", 1),
    "chatglm_v2": ("", 1),
}
OTHER_LAYOUTS = {
    "llama_fused": "",
    "llama_sharded": "",
    "llama_bf16_safetensors": "",
    "pp2_llama": "sharded",
    "tp2_llama": "sharded",
}


def unpickled(file: Path) -> dict[str, Any]:
    """What Python and numpy make of a file."""
    content: dict[str, Any] = pickle.loads(file.read_bytes())
    return content


def bits(arrays: dict[str, Any]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Every bit of the arrays of a file, without the buffer that ChatGLM computes."""
    return {
        name: (array.dtype.str, array.shape, array.tobytes())
        for name, array in arrays.items()
        if name != TABLE and not name.endswith("inv_freq")
    }


@pytest.mark.parametrize("case", GENUINE)
def test_a_genuine_checkpoint_comes_back_array_by_array(tmp_path: Path, case: str) -> None:
    folder, shards = FIXTURES / case / GENUINE[case][0], GENUINE[case][1]
    to_hf(folder, tmp_path / "hf")
    from_hf(tmp_path / "hf", tmp_path / "out", to="paddle", shards=shards)
    files = sorted(file.name for file in folder.glob("*.pdparams"))
    assert sorted(file.name for file in (tmp_path / "out").glob("*.pdparams")) == files
    for name in files:
        written = unpickled(tmp_path / "out" / name)
        assert bits(written) == bits(unpickled(folder / name))
        assert set(written[TABLE]) == set(written) - {TABLE}


@pytest.mark.parametrize("case", OTHER_LAYOUTS)
def test_checkpoints_in_other_layouts_come_back_as_the_same_model(tmp_path: Path, case: str) -> None:
    before = to_hf(FIXTURES / case / OTHER_LAYOUTS[case], tmp_path / "hf").checkpoint
    from_hf(tmp_path / "hf", tmp_path / "out", to="paddle")
    after = open_training(tmp_path / "out")
    assert contents(after) == contents(before) and after.config == {
        name: value for name, value in before.config.items() if name != "torch_dtype"
    }


@pytest.mark.parametrize("case", [*GENUINE])
def test_the_config_equals_the_genuine_one(tmp_path: Path, case: str) -> None:
    folder = FIXTURES / case / GENUINE[case][0]
    to_hf(folder, tmp_path / "hf")
    from_hf(tmp_path / "hf", tmp_path / "out", to="paddle", shards=GENUINE[case][1])
    genuine, written = (json.loads((place / "config.json").read_text()) for place in (folder, tmp_path / "out"))
    unset = {"tie_word_embeddings", "dtype", "sliding_window", "max_window_layers", "tensor_parallel_degree"}
    common = (written.keys() & genuine.keys()) - (unset if case != "tp2_llama" else set())
    assert {name: written[name] for name in common} == {name: genuine[name] for name in common}
    assert len(common) > 8


MODELS = st.fixed_dictionaries(
    {
        "num_key_value_heads": st.sampled_from([1, 2, 4]),
        "num_hidden_layers": st.integers(1, 2),
        "vocab_size": st.sampled_from([24, 30]),
        "tie_word_embeddings": st.booleans(),
        "rope_theta": st.sampled_from([10000.0, 500000.0]),
    }
)
DTYPES = st.sampled_from(["float32", "float16", "bfloat16"])


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(
    kind=st.sampled_from(["llama", "qwen2", "mistral"]), model=MODELS, dtype=DTYPES, shards=st.sampled_from([1, 2, 4])
)
def test_a_decoder_and_back_is_the_same_model(
    tmp_path_factory: pytest.TempPathFactory, kind: str, model: dict[str, Any], dtype: str, shards: int
) -> None:
    folder = tmp_path_factory.mktemp("paddle")
    save_tiny(folder / "model", kind, dtype, **model)
    from_hf(folder / "model", folder / "out", to="paddle", shards=shards)
    to_hf(folder / "out", folder / "back")
    assert identity(folder / "back") == identity(folder / "model")


@pytest.mark.slow_rows("float32-bloom-4", "float32-gpt2-2", "bfloat16-bloom-4")
@pytest.mark.parametrize(("kind", "shards"), [("bloom", 1), ("bloom", 4), ("gpt2", 1), ("gpt2", 2), ("glm", 1)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_others_and_back_are_the_same_models(tmp_path: Path, kind: str, shards: int, dtype: str) -> None:
    save_tiny(tmp_path / "model", kind, dtype)
    from_hf(tmp_path / "model", tmp_path / "out", to="paddle", shards=shards)
    to_hf(tmp_path / "out", tmp_path / "back")
    assert identity(tmp_path / "back") == identity(tmp_path / "model")


SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
]


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: str(scaling["rope_type"]))
def test_stretched_positions_come_back(tmp_path: Path, scaling: dict[str, Any]) -> None:
    save_tiny(tmp_path / "model", "llama", rope_parameters={**scaling, "rope_theta": 5000.0})
    from_hf(tmp_path / "model", tmp_path / "out", to="paddle")
    to_hf(tmp_path / "out", tmp_path / "back")
    assert identity(tmp_path / "back") == identity(tmp_path / "model")


def test_exactly_one_format_detects_the_written_files(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "llama")
    for shards in (1, 2):
        from_hf(tmp_path / "model", tmp_path / str(shards), to="paddle", shards=shards)
        claims = [name for name, found in formats().items() if found.detect(tmp_path / str(shards))]
        assert claims == ["paddle"]


def test_another_dtype_is_rounded_to_once(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "llama")
    from_hf(tmp_path / "model", tmp_path / "out", to="paddle", dtype="float16")
    written = unpickled(tmp_path / "out" / "model_state.pdparams")["llama.embed_tokens.weight"]
    source = open_checkpoint(tmp_path / "model")["model.embed_tokens.weight"].read()
    assert np.array_equal(written, source.astype("f2"))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float16"


def test_tokenizer_and_generation_settings_come_back(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "llama")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    (tmp_path / "model" / "tokenizer.model").write_bytes(b"x")
    (tmp_path / "model" / "generation_config.json").write_text('{"do_sample": true, "top_p": 0.5, "max_length": 9}')
    from_hf(tmp_path / "model", tmp_path / "out", to="paddle")
    assert (tmp_path / "out" / "sentencepiece.bpe.model").read_bytes() == b"x"
    to_hf(tmp_path / "out", tmp_path / "back")
    assert (tmp_path / "back" / "tokenizer.json").read_text() == "{}"
    assert json.loads((tmp_path / "back" / "generation_config.json").read_text()) == {"do_sample": True, "top_p": 0.5}


def test_a_file_of_any_element_type_and_shape_reads_as_with_numpy(tmp_path: Path) -> None:
    arrays = {"b": np.arange(6, dtype="i8").reshape(1, 2, 3), "c": np.array([True, False]), "d": np.zeros((0, 3), "f4")}
    tensors = {name: in_memory(array, BY_NAME[array.dtype.name]) for name, array in arrays.items()}
    pieces = [piece.read().tobytes() if isinstance(piece, LazyTensor) else piece for piece in pdparams_pieces(tensors)]
    (tmp_path / "x.pdparams").write_bytes(b"".join(piece for piece in pieces if isinstance(piece, bytes)))
    read = unpickled(tmp_path / "x.pdparams")
    assert all(read[name].dtype == array.dtype and np.array_equal(read[name], array) for name, array in arrays.items())
    assert contents(open_pdparams(tmp_path / "x.pdparams")) == contents(tensors)


@pytest.mark.parametrize("dtype", ["float8_e5m2", "uint16"])
def test_an_element_type_that_paddle_reads_as_another_is_refused(dtype: str) -> None:
    tensor = in_memory(np.zeros(3, BY_NAME[dtype].numpy), BY_NAME[dtype])
    with pytest.raises(UnsupportedInput, match=f"`a` is {dtype}"):
        pdparams_pieces({"a": tensor})


def test_a_window_that_paddlenlp_ignores_is_a_warning_and_comes_back(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "mistral", sliding_window=8)
    plan = from_hf(tmp_path / "model", tmp_path / "out", to="paddle")
    assert any("PaddleNLP ignores `sliding_window` 8: its results differ" in line for line in plan.warnings)
    assert open_training(tmp_path / "out").config["sliding_window"] == 8


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "biases": ("llama", {"attention_bias": True}, "attention_bias True"),
    "biases of the feed-forward": ("llama", {"mlp_bias": True}, "mlp_bias True"),
    "another activation": ("llama", {"hidden_act": "gelu"}, "hidden_act gelu"),
    "wide heads": ("llama", {"head_dim": 16}, "head_dim 16"),
    "yarn": ("qwen2", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}, "rope_scaling"),
    "linear positions": ("mistral", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling"),
    "a window": ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, "sliding_window"),
    "attention by layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx True"),
    "the exact GELU": ("gpt2", {"activation_function": "gelu"}, "activation_function gelu"),
    "a head of its own": ("bloom", {"tie_word_embeddings": False}, "tie_word_embeddings False"),
    "a base that no ratio gives": ("glm", {"rope_parameters": {"rope_theta": 50001.1}}, "rope_theta"),
    "a model that PaddleNLP names otherwise": ("qwen3", {}, "is a `qwen3`"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_fields_that_paddlenlp_cannot_hold_are_refused_by_name(tmp_path: Path, case: str) -> None:
    kind, changes, words = REFUSED[case]
    save_tiny(tmp_path / "model", kind, **changes)
    with pytest.raises(UnsupportedInput, match=words):
        from_hf(tmp_path / "model", tmp_path / "out", to="paddle")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("kind", "shards"), [("llama", 3), ("gpt2", 16), ("bloom", 5)])
def test_a_number_of_ranks_that_does_not_divide_is_refused(tmp_path: Path, kind: str, shards: int) -> None:
    save_tiny(tmp_path / "model", kind)
    with pytest.raises(UsageProblem, match="does not divide") as refusal:
        from_hf(tmp_path / "model", tmp_path / "out", to="paddle", shards=shards)
    assert "`--shards` may be 1, 2" in refusal.value.hint


def test_ranks_of_a_chatglm_are_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "glm")
    with pytest.raises(UnsupportedInput, match="cannot be split among ranks"):
        from_hf(tmp_path / "model", tmp_path / "out", to="paddle", shards=2)


WRONG: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 25,
    "num_key_value_heads": 4,
    "num_attention_heads": "4",
    "rms_norm_eps": "x",
    "rope_parameters": [1],
    "vocab_size": None,
}


@pytest.mark.parametrize("field", WRONG)
def test_a_config_of_another_model_is_refused(tmp_path: Path, field: str) -> None:
    file = save_tiny(tmp_path / "model", "llama") / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {field: WRONG[field]}))
    with pytest.raises(InputRefused):
        from_hf(tmp_path / "model", tmp_path / "out", to="paddle")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "bloom", "glm"])
def test_a_config_without_sizes_is_refused(tmp_path: Path, kind: str) -> None:
    file = save_tiny(tmp_path / "model", kind) / "config.json"
    config = json.loads(file.read_text())
    for name in config.keys() - {"model_type", "architectures"}:
        file.write_text(json.dumps({other: value for other, value in config.items() if other != name}))
        try:
            from_hf(tmp_path / "model", tmp_path / name, to="paddle")
        except MalformedInput:
            continue
        to_hf(tmp_path / name, tmp_path / f"{name}_back")
        back, model = identity(tmp_path / f"{name}_back"), identity(tmp_path / "model")
        assert (back[0], back[-1]) == (model[0], model[-1])
