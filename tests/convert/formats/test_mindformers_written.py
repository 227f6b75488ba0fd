"""from-hf --to mindformers: MindSpore's files come back byte by byte, and any model that it can hold bit for bit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from llmconv.convert.formats import formats
from llmconv.convert.formats.mindformers import mindspore
from llmconv.convert.formats.mindformers.mindspore import ckpt_pieces, read_ckpt, read_strategy, strategy_bytes
from llmconv.convert.from_hugging_face import from_hf
from llmconv.convert.opening import open_training
from llmconv.convert.to_hugging_face import to_hf
from llmconv.errors import InputRefused, UnsupportedInput, UsageProblem
from llmconv.tensors import BY_NAME, LazyTensor, in_memory
from tests.builders.tiny_models import contents, identity, save_tiny

FILES = (
    *("mindspore/tiny.ckpt", "mindspore/one_b.ckpt", "mindspore/one_bf.ckpt", "mindspore/one_sc.ckpt"),
    *("mindformers/mf102_gpt2/model.ckpt", "mindformers/mf132_glm2/model.ckpt"),
    *("mindformers/mf132_llama_lora/full_with_lora.ckpt", "mindformers/mf170_llama_qkv_concat/model.ckpt"),
)
GENUINE = ("mf102_gpt2", "mf102_llama_gqa", "mf132_bloom", "mf132_glm2", "mf132_llama_gqa")
FUSED = {"mf132_llama_qkv_concat": "plain", "mf170_llama_qkv_concat": "interleaved"}


def joined(tensors: Mapping[str, LazyTensor]) -> bytes:
    """The bytes of a `.ckpt`."""
    return b"".join(
        piece.read().tobytes() if isinstance(piece, LazyTensor) else bytes(piece)  # type: ignore[arg-type]
        for piece in ckpt_pieces(tensors)
    )


@pytest.mark.parametrize("name", FILES)
def test_a_genuine_file_is_written_byte_by_byte(mindspore: Path, name: str) -> None:
    file = mindspore.parent / name
    assert joined(read_ckpt(file).tensors) == file.read_bytes()


def test_a_genuine_strategy_is_written_byte_by_byte(mindspore: Path) -> None:
    file = mindspore / "src_strategy.ckpt"
    stage, operators = file.read_bytes()[:2], 16  # behind the stage stands how an operator was divided, unused
    assert strategy_bytes(read_strategy(file)) == stage + file.read_bytes()[2 + operators :]


@pytest.mark.parametrize("case", GENUINE)
def test_a_genuine_checkpoint_comes_back_tensor_by_tensor(mindformers: Path, tmp_path: Path, case: str) -> None:
    to_hf(mindformers / case / "model.ckpt", tmp_path / "hf")
    from_hf(tmp_path / "hf", tmp_path / "out", to="mindformers")
    genuine = read_ckpt(mindformers / case / "model.ckpt").tensors
    model = {name: tensor for name, tensor in genuine.items() if "_cache" not in name and "_past" not in name}
    assert contents(read_ckpt(tmp_path / "out" / "model.ckpt").tensors) == contents(model)


@pytest.mark.parametrize("case", GENUINE)
def test_the_run_configuration_equals_the_genuine_one(mindformers: Path, tmp_path: Path, case: str) -> None:
    to_hf(mindformers / case / "model.ckpt", tmp_path / "hf")
    from_hf(tmp_path / "hf", tmp_path / "out", to="mindformers")
    genuine, written = (
        yaml.safe_load((folder / "run.yaml").read_text())["model"] for folder in (mindformers / case, tmp_path / "out")
    )
    assert written["arch"] == genuine["arch"]
    common = (written["model_config"].keys() & genuine["model_config"].keys()) - {"seq_length"}
    assert len(common) > 6
    assert {name: written["model_config"][name] for name in common} == {
        name: genuine["model_config"][name] for name in common
    }


@pytest.mark.parametrize("case", FUSED)
@pytest.mark.parametrize("shards", [1, 2])
def test_fused_matrices_come_back_apart_and_without_a_question(
    mindformers: Path, tmp_path: Path, case: str, shards: int
) -> None:
    before = to_hf(mindformers / case / "model.ckpt", tmp_path / "hf", qkv_layout=FUSED[case]).checkpoint
    from_hf(tmp_path / "hf", tmp_path / "out", to="mindformers", shards=shards)
    assert contents(open_training(tmp_path / "out")) == contents(before)


MODELS = st.fixed_dictionaries(
    {
        "num_key_value_heads": st.sampled_from([1, 2, 4]),
        "num_hidden_layers": st.integers(1, 2),
        "vocab_size": st.sampled_from([24, 32]),
        "tie_word_embeddings": st.booleans(),
        "rope_theta": st.sampled_from([10000.0, 500000.0]),
    }
)
DTYPES = st.sampled_from(["float32", "float16", "bfloat16"])


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(kind=st.sampled_from(["llama", "qwen2", "qwen3"]), model=MODELS, dtype=DTYPES, shards=st.sampled_from([1, 2, 4]))
def test_a_decoder_and_back_is_the_same_model(
    tmp_path_factory: pytest.TempPathFactory, kind: str, model: dict[str, Any], dtype: str, shards: int
) -> None:
    folder, shards = tmp_path_factory.mktemp("mindformers"), min(shards, model["num_key_value_heads"])
    save_tiny(folder / "model", kind, dtype, **model)
    from_hf(folder / "model", folder / "out", to="mindformers", shards=shards)
    to_hf(folder / "out", folder / "back")
    assert identity(folder / "back") == identity(folder / "model")


@pytest.mark.slow_rows("float32-bloom-4", "float32-gpt2-2", "bfloat16-bloom-4", "bfloat16-gpt2-2")
@pytest.mark.parametrize(
    ("kind", "shards"), [("bloom", 1), ("bloom", 4), ("gpt2", 1), ("gpt2", 2), ("glm", 1), ("glm", 2)]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_others_and_back_are_the_same_models(tmp_path: Path, kind: str, shards: int, dtype: str) -> None:
    save_tiny(tmp_path / "model", kind, dtype)
    from_hf(tmp_path / "model", tmp_path / "out", to="mindformers", shards=shards)
    to_hf(tmp_path / "out", tmp_path / "back")
    assert identity(tmp_path / "back") == identity(tmp_path / "model")


HELD: dict[str, dict[str, Any]] = {
    "biases on all four, as InternLM": {"attention_bias": True},
    "linear positions": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0}},
    "Llama 3.1's positions": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 5000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
}


@pytest.mark.parametrize("case", HELD)
def test_fields_of_the_configuration_come_back(tmp_path: Path, case: str) -> None:
    save_tiny(tmp_path / "model", "llama", **HELD[case])
    from_hf(tmp_path / "model", tmp_path / "out", to="mindformers")
    to_hf(tmp_path / "out", tmp_path / "back")
    assert identity(tmp_path / "back") == identity(tmp_path / "model")


def test_exactly_one_format_detects_the_written_files(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "llama")
    for shards in (1, 2):
        from_hf(tmp_path / "model", tmp_path / str(shards), to="mindformers", shards=shards)
        claims = [name for name, found in formats().items() if found.detect(tmp_path / str(shards))]
        assert claims == ["mindformers"]


def test_each_rank_has_its_part_and_the_strategy(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "llama")
    from_hf(tmp_path / "model", tmp_path / "out", to="mindformers", shards=2)
    whole = read_ckpt(from_hf_whole(tmp_path)).tensors
    for rank in (0, 1):
        part = read_ckpt(tmp_path / "out" / f"rank_{rank}" / f"checkpoint_{rank}.ckpt").tensors
        wq, wo = (f"model.layers.0.attention.{name}.weight" for name in ("wq", "wo"))
        assert np.array_equal(part[wq].read(), np.split(whole[wq].read(), 2, 0)[rank])
        assert np.array_equal(part[wo].read(), np.split(whole[wo].read(), 2, 1)[rank])
        layouts = read_strategy(tmp_path / "out" / "strategy" / f"ckpt_strategy_rank_{rank}.ckpt")
        assert layouts[wq].axes == ((0,), ()) and layouts[wo].axes == ((), (0,)) and layouts[wq].devices == (2,)


def from_hf_whole(folder: Path) -> Path:
    from_hf(folder / "model", folder / "whole", to="mindformers")
    return folder / "whole" / "model.ckpt"


@pytest.mark.parametrize("chunk", [1, 7, 64, 65, 1000])
def test_a_large_tensor_is_cut_even_inside_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save_ckpt: Any, chunk: int
) -> None:
    values = np.arange(5 * 16, dtype=np.int32).reshape(5, 16)
    monkeypatch.setattr(mindspore, "CHUNK_BYTES", chunk)
    written = joined({"a.weight": in_memory(values, BY_NAME["int32"])})
    assert written == save_ckpt(tmp_path / "x", {"a.weight": values}, chunk=chunk).read_bytes()


def test_an_interrupted_run_goes_on_where_ranks_lie_in_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny(tmp_path / "model", "llama")
    monkeypatch.setattr(
        "llmconv.output.local_folder.StagedFolder.commit", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    with pytest.raises(KeyboardInterrupt):
        from_hf(tmp_path / "model", tmp_path / "out", to="mindformers", shards=2)
    monkeypatch.undo()
    from_hf(tmp_path / "model", tmp_path / "out", to="mindformers", shards=2, resume=True)
    to_hf(tmp_path / "out", tmp_path / "back")
    assert identity(tmp_path / "back") == identity(tmp_path / "model")


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "a model that MindFormers does not have": ("mistral", {}, "is a `mistral`"),
    "biases of the feed-forward": ("llama", {"mlp_bias": True}, "mlp_bias True"),
    "another activation": ("llama", {"hidden_act": "gelu"}, "hidden_act gelu"),
    "wide heads": ("llama", {"head_dim": 16}, "head_dim 16"),
    "dynamic positions": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_scaling"),
    "yarn": ("qwen2", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}, "rope_scaling"),
    "a window": ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, "sliding_window"),
    "biases of a Qwen 3": ("qwen3", {"attention_bias": True}, "attention_bias True"),
    "attention by layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx True"),
    "the exact GELU": ("gpt2", {"activation_function": "gelu"}, "activation_function gelu"),
    "another epsilon": ("gpt2", {"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon 1e-06"),
    "an odd feed-forward": ("gpt2", {"n_inner": 40}, "intermediate_size 40"),
    "norms behind": ("bloom", {"apply_residual_connection_post_layernorm": True}, "post_layernorm True"),
    "a head of its own": ("bloom", {"tie_word_embeddings": False}, "tie_word_embeddings False"),
    "all of a head rotated": ("glm", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.0}}, "partial"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_fields_that_mindformers_cannot_hold_are_refused_by_name(tmp_path: Path, case: str) -> None:
    kind, changes, words = REFUSED[case]
    save_tiny(tmp_path / "model", kind, **changes)
    with pytest.raises(UnsupportedInput, match=words):
        from_hf(tmp_path / "model", tmp_path / "out", to="mindformers")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("kind", "shards"), [("llama", 4), ("gpt2", 3), ("bloom", 5), ("glm", 4)])
def test_a_number_of_ranks_that_does_not_divide_is_refused(tmp_path: Path, kind: str, shards: int) -> None:
    save_tiny(tmp_path / "model", kind)
    with pytest.raises(UsageProblem, match="does not divide|cannot be divided"):
        from_hf(tmp_path / "model", tmp_path / "out", to="mindformers", shards=shards)


def test_a_head_that_equals_the_embedding_is_written_and_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_tiny(tmp_path / "model", "llama")
    weights = load_file(model / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    save_file(weights, model / "model.safetensors")
    from_hf(model, tmp_path / "out", to="mindformers")
    assert "`to-hf` will tie them" in capsys.readouterr().err
    written = read_ckpt(tmp_path / "out" / "model.ckpt").tensors
    assert np.array_equal(written["lm_head.weight"].read(), weights["lm_head.weight"])


WRONG = ("hidden_size", "intermediate_size", "num_key_value_heads", "n_embd", "n_layer", "n_head", "vocab_size")


@pytest.mark.slow_rows("qwen3-7")
@pytest.mark.parametrize("value", [None, 7, "x", [2], -1, 1 << 40])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "bloom", "glm", "qwen3"])
def test_sizes_of_another_model_are_refused(tmp_path: Path, kind: str, value: Any) -> None:
    file = save_tiny(tmp_path / "model", kind) / "config.json"
    config = json.loads(file.read_text())
    for name in (name for name in WRONG if name in config):
        file.write_text(json.dumps(config | {name: value}))
        with pytest.raises(InputRefused):
            from_hf(tmp_path / "model", tmp_path / "out", to="mindformers")


def test_an_element_type_that_mindspore_does_not_have_is_refused() -> None:
    kind = BY_NAME["float8_e4m3fn"]
    with pytest.raises(UnsupportedInput, match="`a` is float8_e4m3fn"):
        joined({"a": in_memory(np.zeros(3, kind.numpy), kind)})
