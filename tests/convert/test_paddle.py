"""PaddleNLP checkpoints: genuine ones give the upstream's logits, any split the same tensors, a wrong set a refusal."""

from __future__ import annotations

import json
import pickle
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from safetensors.numpy import save_file

from llmconv.checkpoint import open_checkpoint
from llmconv.convert import to_hf
from llmconv.convert.formats import formats
from llmconv.convert.inspect import inspect
from llmconv.convert.to_hf import open_training
from llmconv.errors import InputRefused, MalformedInput, UnsupportedInput

FIXTURES = Path(__file__).parents[1] / "fixtures" / "paddle"

CASES = {
    "llama_gqa_fp32": ("", "llama", "logits"),
    "llama_fused": ("", "llama", "logits"),
    "llama_sharded": ("", "llama", "logits"),
    "llama_safetensors": ("", "llama", "logits"),
    "llama_bf16_safetensors": ("", "llama", "logits"),
    "tp2_llama": ("sharded", "llama", "logits"),
    "pp2_llama": ("sharded", "llama", "logits"),
    "prefix_llama_bf16": ("base", "llama", "logits_no_prefix"),
    "qwen": ("", "qwen2", "logits"),
    "qwen2": ("", "qwen2", "logits"),
    "bloom": ("", "bloom", "logits"),
    "gpt3": ("", "gpt2", "logits"),
    "chatglm_v2": ("", "glm", "logits"),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_upstream_model(tmp_path: Path, logits_of: Callable[..., Any], case: str) -> None:
    folder, model_type, key = CASES[case]
    to_hf(FIXTURES / case / folder, tmp_path / "hf")
    assert open_checkpoint(tmp_path / "hf").config["model_type"] == model_type
    with np.load(FIXTURES / case / "reference.npz") as reference:
        logits = logits_of(tmp_path / "hf", reference["input_ids"])
        assert np.abs(logits - reference[key]).max() < 1e-5 * np.abs(reference[key]).max()


@pytest.mark.parametrize("case", CASES)
def test_exactly_one_format_claims_each_fixture(case: str) -> None:
    path = FIXTURES / case / CASES[case][0]
    assert [name for name, candidate in formats().items() if candidate.detect(path)] == ["paddle"]


def test_a_single_file_takes_the_config_beside_it() -> None:
    checkpoint = open_training(FIXTURES / "llama_gqa_fp32" / "model_state.pdparams")
    assert contents(checkpoint) == contents(open_training(FIXTURES / "llama_gqa_fp32"))


def test_a_config_can_be_given_and_wins(tmp_path: Path) -> None:
    file = Path(shutil.copy(FIXTURES / "llama_gqa_fp32" / "model_state.pdparams", tmp_path))
    with pytest.raises(InputRefused, match=r"no `config\.json` beside it"):
        open_training(file)
    (tmp_path / "more.json").write_text('{"rope_theta": 5000.0}')
    configs = (FIXTURES / "llama_gqa_fp32", tmp_path / "more.json")
    assert open_training(file, config=configs).config["rope_theta"] == 5000.0


def test_bfloat16_stays_bfloat16_bit_for_bit(tmp_path: Path) -> None:
    to_hf(FIXTURES / "llama_bf16_safetensors", tmp_path / "hf")
    opened = open_checkpoint(tmp_path / "hf")
    assert {tensor.dtype.name for tensor in opened.values()} == {"bfloat16"}
    assert opened.config["torch_dtype"] == "bfloat16"


def test_qwen_says_up_to_which_length_it_is_the_same() -> None:
    assert any("beyond 64 tokens" in warning for warning in open_training(FIXTURES / "qwen").warnings)


def test_inspect_names_the_format_and_what_it_becomes() -> None:
    summary = inspect(FIXTURES / "tp2_llama" / "sharded").summary()
    assert (summary["format"], summary["model_type"], summary["tensors"]) == ("paddle", "llama", 21)
    assert summary["dtypes"] == {"float32": 21}


# Checkpoints made here: one whole model in Paddle's layout, cut as PaddleNLP cuts

Model = dict[str, np.ndarray[Any, Any]]

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
ROWS = ("o_proj.weight", "down_proj.weight", "embed_tokens.weight")


def whole_model(kv_heads: int = 2) -> Model:
    """A seeded Llama in Paddle's names; heads of 2, weights (in, out)."""
    shapes: dict[str, tuple[int, ...]] = {"llama.embed_tokens.weight": (16, 8), "llama.norm.weight": (8,)}
    for layer in range(2):
        attention, feed = f"llama.layers.{layer}.self_attn.", f"llama.layers.{layer}.mlp."
        shapes |= {f"{attention}q_proj.weight": (8, 8), f"{attention}o_proj.weight": (8, 8)}
        shapes |= {f"{attention}{name}_proj.weight": (8, 2 * kv_heads) for name in "kv"}
        shapes |= {f"{feed}gate_proj.weight": (8, 12), f"{feed}up_proj.weight": (8, 12)}
        shapes |= {f"{feed}down_proj.weight": (12, 8)}
        shapes |= {f"llama.layers.{layer}.{name}_layernorm.weight": (8,) for name in ("input", "post_attention")}
    random = np.random.default_rng(0)
    shapes["lm_head.weight"] = (8, 16)
    return {name: random.standard_normal(shape).astype("f4") for name, shape in shapes.items()}


def fused(model: Model, ranks: int) -> list[Model]:
    """`model` cut over `ranks`, with qkv by key/value head and [gate | up] in each."""
    parts = [cut(model, ranks, rank, 2) for rank in range(ranks)]
    for part in parts:
        for layer in range(2):
            attention, feed = f"llama.layers.{layer}.self_attn.", f"llama.layers.{layer}.mlp."
            q, k, v = (part.pop(f"{attention}{name}_proj.weight") for name in "qkv")
            heads = [np.split(array, 2 // ranks, axis=1) for array in (q, k, v)]
            part[f"{attention}qkv_proj.weight"] = np.concatenate(
                [piece for group in zip(*heads, strict=True) for piece in group], axis=1
            )
            gate_up = [part.pop(f"{feed}{name}_proj.weight") for name in ("gate", "up")]
            part[f"{feed}gate_up_fused_proj.weight"] = np.concatenate(gate_up, axis=1)
    return parts


def cut(model: Model, ranks: int, rank: int, kv_heads: int) -> Model:
    """What one tensor-parallel rank holds; key and value stay whole where their heads do not divide."""

    def part(name: str, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        if name.endswith("norm.weight") or (name.endswith(("k_proj.weight", "v_proj.weight")) and kv_heads % ranks):
            return array
        return np.ascontiguousarray(np.split(array, ranks, axis=0 if name.endswith(ROWS) else 1)[rank])

    return {name: part(name, array) for name, array in model.items()}


def save(folder: Path, files: Mapping[str, Model], protocol: int = 4, **changes: Any) -> Path:
    """Writes `files` as `paddle.save` does, beside a config."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    for name, model in files.items():
        table = {"StructuredToParameterName@@": {key: f"linear_{n}.w_0" for n, key in enumerate(model)}}
        (folder / name).write_bytes(pickle.dumps({**model, **table}, protocol))
    return folder


def save_whole(folder: Path, model: Model, **changes: Any) -> Path:
    return save(folder, {"model_state.pdparams": model}, **changes)


def contents(checkpoint: Any) -> dict[str, bytes]:
    return {name: tensor.read().tobytes() for name, tensor in checkpoint.items()}


@settings(max_examples=12, deadline=None)
@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]), st.sampled_from([1, 2, 4]), st.sampled_from([2, 3, 4]))
def test_any_grid_of_ranks_gives_the_same_tensors(
    tmp_path_factory: pytest.TempPathFactory, ranks: int, stages: int, kv_heads: int, protocol: int
) -> None:
    folder, model = tmp_path_factory.mktemp("grid"), whole_model(kv_heads)
    changes = {"num_key_value_heads": kv_heads, "tensor_parallel_degree": ranks}
    files: dict[str, Model] = {}
    for rank in range(ranks):
        part = cut(model, ranks, rank, kv_heads)
        late = {name for name in part if "layers.1" in name or name in ("llama.norm.weight", "lm_head.weight")}
        for stage in range(stages):
            names = part if stages == 1 else late if stage else set(part) - late
            files[f"model_state.tp{rank:02}_pp{stage:02}.pdparams"] = {name: part[name] for name in names}
    one = save_whole(folder / "one", model, **changes | {"tensor_parallel_degree": 1})
    assert contents(open_training(save(folder / "grid", files, protocol, **changes))) == contents(open_training(one))


@pytest.mark.parametrize("ranks", [1, 2])
def test_fused_projections_give_the_same_tensors(tmp_path: Path, ranks: int) -> None:
    model = whole_model()
    files = {f"model_state.tp{rank:02}.pdparams": part for rank, part in enumerate(fused(model, ranks))}
    assert contents(open_training(save(tmp_path / "fused", files))) == contents(
        open_training(save_whole(tmp_path / "one", model))
    )


SPLITS: dict[str, tuple[str, dict[str, int]]] = {
    "bloom": (
        r"(word_embeddings|dense|4h_to_h)\.weight$",
        {r"(query_key_value|h_to_4h)\.weight$": 1, r"(query_key_value|h_to_4h)\.bias$": 0},
    ),
    "gpt3": (
        r"(word_embeddings|out_proj|linear2|lm_head)\.weight$",
        {r"([qkv]_proj|linear1)\.weight$": 1, r"([qkv]_proj|linear1)\.bias$": 0},
    ),
    "qwen": (r"(wte|c_proj)\.weight$", {r"(c_attn|w1|w2|lm_head)\.weight$": 1, r"c_attn\.bias$": 0}),
}
"""Names that PaddleNLP splits along axis 0, and others with their axis, as its tensor-parallel mappings say."""


@pytest.mark.parametrize("case", SPLITS)
def test_other_families_are_joined_as_their_mappings_split_them(tmp_path: Path, case: str) -> None:
    rows, others = SPLITS[case]
    state = pickle.loads((FIXTURES / case / "model_state.pdparams").read_bytes())
    state.pop("StructuredToParameterName@@")
    files: dict[str, Model] = {f"model_state.tp{rank:02}.pdparams": {} for rank in range(2)}
    for name, array in state.items():
        axis = next((axis for pattern, axis in {rows: 0, **others}.items() if re.search(pattern, name)), None)
        thirds = np.split(array, 3, axis=-1) if "c_attn" in name else [array]
        for rank, file in enumerate(files.values()):
            cuts = thirds if axis is None else [np.split(part, 2, axis=axis)[rank] for part in thirds]
            file[name] = np.concatenate(cuts, axis=-1)
    folder = save(tmp_path / "x", files)
    shutil.copy(FIXTURES / case / "config.json", folder)
    assert contents(open_training(folder)) == contents(open_training(FIXTURES / case))


def test_weights_are_transposed_and_embeddings_are_not(tmp_path: Path) -> None:
    model = whole_model()
    checkpoint = open_training(save_whole(tmp_path / "x", model))
    assert np.array_equal(
        checkpoint["model.layers.1.mlp.up_proj.weight"].read(), model["llama.layers.1.mlp.up_proj.weight"].T
    )
    assert np.array_equal(checkpoint["model.embed_tokens.weight"].read(), model["llama.embed_tokens.weight"])


def test_paddles_safetensors_with_any_metadata_are_told_from_hugging_faces(tmp_path: Path) -> None:
    folder = save_whole(tmp_path / "x", whole_model())
    expected = contents(open_training(folder))
    (folder / "model_state.pdparams").unlink()
    save_file(whole_model(), folder / "model.safetensors", metadata={"format": "pt"})
    assert contents(open_training(folder)) == expected


def test_a_tied_head_as_paddle_3_saves_it_is_dropped(tmp_path: Path) -> None:
    model = whole_model()
    model["lm_head.weight"] = model["llama.embed_tokens.weight"].copy()
    checkpoint = open_training(save_whole(tmp_path / "x", model, tie_word_embeddings=True))
    assert "lm_head.weight" not in checkpoint
    assert checkpoint.config["tie_word_embeddings"] is True


def test_a_head_that_differs_from_its_embedding_is_kept_with_a_warning(tmp_path: Path) -> None:
    model = whole_model()
    model["lm_head.weight"] = model["llama.embed_tokens.weight"] + 1
    checkpoint = open_training(save_whole(tmp_path / "x", model, tie_word_embeddings=True))
    assert checkpoint.config["tie_word_embeddings"] is False
    assert np.array_equal(checkpoint["lm_head.weight"].read(), model["lm_head.weight"])
    assert any("they differ" in warning for warning in checkpoint.warnings)


def test_buffers_of_rope_are_dropped(tmp_path: Path) -> None:
    model = whole_model() | {"llama.layers.0.self_attn.rotary_emb.inv_freq": np.ones(1, "f4")}
    checkpoint = open_training(save_whole(tmp_path / "x", model))
    assert contents(checkpoint) == contents(open_training(save_whole(tmp_path / "y", whole_model())))


ROPE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "linear": (
        {"rope_scaling_type": "linear", "rope_scaling_factor": 4.0},
        {"rope_theta": 10000.0, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    ),
    "ntk": ({"rope_scaling_type": "ntk", "rope_scaling_factor": 4.0, "head_dim": 4}, {"rope_theta": 160000.0}),
    "dynamic": (
        {"rope_scaling_type": "dynamic_ntk", "rope_scaling_factor": 2.0},
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    ),
}


@pytest.mark.parametrize(("change", "expected"), ROPE.values(), ids=ROPE.keys())
def test_rope_scaling_is_translated(change: dict[str, Any], expected: dict[str, Any]) -> None:
    from llmconv.convert.paddle_configs import to_config  # noqa: PLC0415

    assert expected.items() <= to_config(CONFIG | change, "x", []).items()


def test_a_fused_gpt_is_put_in_thirds(tmp_path: Path) -> None:
    checkpoint = open_training(FIXTURES / "gpt3")
    state = pickle.loads((FIXTURES / "gpt3" / "model_state.pdparams").read_bytes())
    state.pop("StructuredToParameterName@@")
    for layer in range(2):
        for part in ("weight", "bias"):
            base = f"gpt.decoder.layers.{layer}.self_attn."
            heads = [np.split(state.pop(f"{base}{name}_proj.{part}"), 4, axis=-1) for name in "qkv"]
            pieces = [piece for group in zip(*heads, strict=True) for piece in group]
            state[f"{base}qkv_proj.{part}"] = np.concatenate(pieces, axis=-1)
    folder = save_whole(tmp_path / "x", state)
    shutil.copy(FIXTURES / "gpt3" / "config.json", folder)
    assert contents(open_training(folder)) == contents(checkpoint)


# What is refused


def test_a_missing_last_rank_is_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(FIXTURES / "tp2_llama" / "sharded", tmp_path / "x")
    (folder / "model_state.tp01.pdparams").unlink()
    with pytest.raises(MalformedInput, match="lacks the files of 1 of 2 ranks, first tensor-parallel 1, pipeline 0"):
        to_hf(folder, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize(("stage", "reason"), [("pp00", "lacks the files of 1 of 2"), ("pp01", "lacks 10 tensors")])
def test_a_missing_stage_is_refused(tmp_path: Path, stage: str, reason: str) -> None:
    folder = shutil.copytree(FIXTURES / "pp2_llama" / "sharded", tmp_path / "x")
    (folder / f"model_state.{stage}.pdparams").unlink()
    with pytest.raises(MalformedInput, match=reason):
        open_training(folder)


def test_a_missing_rank_that_the_config_does_not_tell_is_seen_by_the_shapes(tmp_path: Path) -> None:
    files = {"model_state.tp00.pdparams": cut(whole_model(), 2, 0, 2)}
    with pytest.raises(MalformedInput, match=r"has shape \[8, 8\], its configuration says \[16, 8\]"):
        open_training(save(tmp_path / "x", files))


def test_one_file_of_several_is_refused() -> None:
    with pytest.raises(InputRefused, match="one of several files"):
        open_training(FIXTURES / "tp2_llama" / "sharded" / "model_state.tp00.pdparams")


def test_a_missing_shard_is_refused_by_name(tmp_path: Path) -> None:
    folder = shutil.copytree(FIXTURES / "llama_sharded", tmp_path / "x")
    (folder / "model_state-00002-of-00005.pdparams").unlink()
    with pytest.raises(MalformedInput, match=r"`model_state-00002-of-00005\.pdparams` is missing"):
        open_training(folder)


def test_a_shard_outside_the_folder_is_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(FIXTURES / "llama_sharded", tmp_path / "x")
    index = folder / "model_state.pdparams.index.json"
    index.write_text(index.read_text().replace("model_state-00002", "../model_state-00002"))
    with pytest.raises(MalformedInput, match="names the shard"):
        open_training(folder)


def test_shards_without_their_index_are_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(FIXTURES / "llama_sharded", tmp_path / "x")
    (folder / "model_state.pdparams.index.json").unlink()
    with pytest.raises(MalformedInput, match="has shards, but no"):
        open_training(folder)


def test_weights_of_two_kinds_in_one_folder_are_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(FIXTURES / "tp2_llama" / "sharded", tmp_path / "x")
    shutil.copy(FIXTURES / "llama_gqa_fp32" / "model_state.pdparams", folder)
    with pytest.raises(InputRefused, match="holds its weights more than once"):
        open_training(folder)


def test_a_truncated_file_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    folder = shutil.copytree(FIXTURES / "llama_gqa_fp32", tmp_path / "x")
    data = (folder / "model_state.pdparams").read_bytes()
    for size in (len(data) - 1, len(data) // 2, 200):
        (folder / "model_state.pdparams").write_bytes(data[:size])
        with pytest.raises(MalformedInput, match="truncated"):
            to_hf(folder, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_a_lora_is_sent_to_merge_lora() -> None:
    with pytest.raises(UnsupportedInput, match=r"LoRA adapter \(`lora_model_state\.pdparams`\)") as refusal:
        open_training(FIXTURES / "lora_llama" / "lora")
    assert "merge-lora" in refusal.value.hint


def test_a_prefix_is_named() -> None:
    with pytest.raises(UnsupportedInput, match="is a prefix"):
        open_training(FIXTURES / "prefix_llama_bf16" / "prefix")


def test_an_optimizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    shutil.copy(FIXTURES / "opt_322.pdopt", tmp_path)
    with pytest.raises(UnsupportedInput, match="state of an optimizer"):
        open_training(tmp_path / "opt_322.pdopt")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown architecture": ({"model_type": "jamba"}, "model of type `jamba`, which this format does not know"),
    "one without an equal": ({"model_type": "chatglm"}, "ChatGLM-6B v1 has two rotary positions per token"),
    "no architecture": ({"model_type": None}, "model of type `None`"),
    "a list for a name": ({"model_type": ["llama"]}, "which this format does not know"),
    "ALiBi": ({"alibi": True}, r"Llama with ALiBi \(as Baichuan-13B is\)"),
    "a long-sequence strategy": ({"use_long_sequence_strategies": True}, "cannot express"),
    "unknown rope": ({"rope_scaling_type": "yarn"}, "scales its rotary positions by `yarn`"),
    "another hidden size": ({"hidden_size": 16}, r"its configuration says \[16, 16\]"),
    "another vocabulary": ({"vocab_size": 17}, r"its configuration says \[17, 8\]"),
    "more layers": ({"num_hidden_layers": 3}, "lacks 9 tensors of the model"),
    "a billion layers": ({"num_hidden_layers": 10**9}, "tensors of the model"),
    "fewer layers": ({"num_hidden_layers": 1}, "9 tensors that no rule places"),
    "odd heads": ({"num_key_value_heads": 3}, "4 query heads for key/value heads 3"),
    "text for a number": ({"hidden_size": "8"}, "no usable `hidden_size`"),
    "text for a real": ({"rms_norm_eps": "1e-6"}, "no usable `rms_norm_eps`"),
    "no head": ({"hidden_size": 0}, "no usable `hidden_size`"),
}


@pytest.mark.parametrize(("change", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_a_config_of_another_model_is_refused(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    folder = save_whole(tmp_path / "x", whole_model(), **change)
    with pytest.raises(InputRefused, match=reason):
        open_training(folder)


def test_a_quantized_checkpoint_is_refused(tmp_path: Path) -> None:
    model = whole_model()
    model["llama.layers.0.mlp.up_proj.quant_weight"] = model.pop("llama.layers.0.mlp.up_proj.weight").astype("i1")
    with pytest.raises(UnsupportedInput, match="is quantized"):
        open_training(save_whole(tmp_path / "x", model))


def test_a_static_graph_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.pdiparams").write_bytes(b"weights")
    with pytest.raises(UnsupportedInput, match="static graph of Paddle"):
        open_training(tmp_path)


def test_hugging_faces_names_in_paddles_safetensors_are_not_claimed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"paddlenlp_version": None}))
    save_file({"model.norm.weight": np.ones(2, "f4")}, tmp_path / "model.safetensors", metadata={"format": "np"})
    assert not formats()["paddle"].detect(tmp_path)


def test_an_unknown_model_of_paddle_is_claimed_and_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "ernie", "paddlenlp_version": null}')
    save_file({"ernie.norm.weight": np.ones(2, "f4")}, tmp_path / "model.safetensors", metadata={"format": "np"})
    with pytest.raises(UnsupportedInput, match="transformers has ERNIE only as an encoder"):
        open_training(tmp_path)


def test_a_baichuan_7b_is_a_llama(tmp_path: Path) -> None:
    checkpoint = open_training(save_whole(tmp_path / "x", whole_model(), model_type="baichuan"))
    assert checkpoint.config["architectures"] == ["LlamaForCausalLM"]


def test_a_split_chatglm_is_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(FIXTURES / "chatglm_v2", tmp_path / "x")
    shutil.copy(folder / "model_state.pdparams", folder / "model_state.tp01.pdparams")
    (folder / "model_state.pdparams").rename(folder / "model_state.tp00.pdparams")
    with pytest.raises(UnsupportedInput, match="chatglm_v2 split over 2 tensor-parallel ranks"):
        open_training(folder)
