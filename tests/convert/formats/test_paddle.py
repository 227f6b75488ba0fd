"""PaddleNLP checkpoints: genuine ones give the upstream's logits, any split the same tensors, a wrong set a refusal."""

from __future__ import annotations

import json
import pickle
import re
import shutil
from collections.abc import Callable
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
from llmconv.convert.formats.paddle.config import to_config
from llmconv.convert.inspection import inspect
from llmconv.convert.models.head_and_dtype import settled
from llmconv.convert.opening import open_training
from llmconv.errors import InputRefused
from tests.builders.paddle_models import CONFIG, FIXTURES, Model, contents, cut, fused, save, save_whole, whole_model

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
    "mistral_window": ("", "mistral", "logits"),
    "qwen2_window": ("", "qwen2", "logits"),
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


def test_a_single_file_takes_the_config_next_to_it() -> None:
    checkpoint = open_training(FIXTURES / "llama_gqa_fp32" / "model_state.pdparams")
    assert contents(checkpoint) == contents(open_training(FIXTURES / "llama_gqa_fp32"))


def test_a_config_can_be_given_and_wins(tmp_path: Path) -> None:
    file = Path(shutil.copy(FIXTURES / "llama_gqa_fp32" / "model_state.pdparams", tmp_path))
    with pytest.raises(InputRefused, match=r"no `config\.json` next to it"):
        open_training(file)
    (tmp_path / "more.json").write_text('{"rope_theta": 5000.0}')
    configs = (FIXTURES / "llama_gqa_fp32", tmp_path / "more.json")
    assert open_training(file, config=configs).config["rope_theta"] == 5000.0


def test_bfloat16_stays_bfloat16_bit_for_bit(tmp_path: Path) -> None:
    to_hf(FIXTURES / "llama_bf16_safetensors", tmp_path / "hf")
    opened = open_checkpoint(tmp_path / "hf")
    assert {tensor.dtype.name for tensor in opened.values()} == {"bfloat16"}
    assert opened.config["torch_dtype"] == "bfloat16"


def test_qwen_reports_the_length_up_to_which_it_is_the_same() -> None:
    assert any("beyond 64 tokens" in warning for warning in open_training(FIXTURES / "qwen").warnings)


@pytest.mark.parametrize("case", ["mistral_window", "qwen2_window"])
def test_a_window_that_paddlenlp_ignores_is_reported(case: str) -> None:
    assert any("PaddleNLP ignores `sliding_window` 8" in line for line in open_training(FIXTURES / case).warnings)


def test_a_window_in_a_file_that_paddlenlp_did_not_write_is_kept() -> None:
    config = {**CONFIG, "model_type": "mistral", "sliding_window": 8}
    warnings: list[str] = []
    assert to_config(config, "x", warnings)["sliding_window"] == 8
    assert warnings == []


def test_inspect_names_the_format_and_what_it_becomes() -> None:
    summary = inspect(FIXTURES / "tp2_llama" / "sharded").summary()
    assert (summary["format"], summary["model_type"], summary["tensors"]) == ("paddle", "llama", 21)
    assert summary["dtypes"] == {"float32": 21}


# Checkpoints made here


@pytest.mark.slow
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


def safe(folder: Path, files: dict[str, Model], **changes: Any) -> Path:
    """`files` as PaddleNLP's safetensors: numpy's metadata, no index."""
    save(folder, {}, **changes)
    for name, model in files.items():
        save_file(model, folder / name, metadata={"format": "np"})
    return folder


@pytest.mark.parametrize(("ranks", "stages"), [(2, 1), (4, 1), (1, 2), (2, 2)])
def test_safetensors_per_rank_give_the_tensors_of_the_whole_model(tmp_path: Path, ranks: int, stages: int) -> None:
    model, changes = whole_model(4), {"num_key_value_heads": 4, "tensor_parallel_degree": ranks}
    files: dict[str, Model] = {}
    for rank in range(ranks):
        part = cut(model, ranks, rank, 4)
        late = {name for name in part if "layers.1" in name or name in ("llama.norm.weight", "lm_head.weight")}
        for stage in range(stages):
            names = part if stages == 1 else late if stage else set(part) - late
            marks = [f"tp{rank:02}"] * (ranks > 1) + [f"pp{stage:02}"] * (stages > 1)
            files[f"model.{'_'.join(marks)}.safetensors"] = {name: part[name] for name in names}
    folder = safe(tmp_path / "ranks", files, **changes)
    assert [name for name, found in formats().items() if found.detect(folder)] == ["paddle"]
    whole = open_training(save_whole(tmp_path / "whole", model, num_key_value_heads=4))
    assert contents(open_training(folder)) == contents(whole)
    assert inspect(folder).shards == ranks * stages


def test_the_genuine_ranks_as_safetensors_give_the_upstreams_logits(
    tmp_path: Path, logits_of: Callable[..., Any]
) -> None:
    genuine = FIXTURES / "tp2_llama" / "sharded"
    shutil.copytree(genuine, tmp_path / "x", ignore=shutil.ignore_patterns("*.pdparams"))
    for file in genuine.glob("*.pdparams"):
        state = pickle.loads(file.read_bytes())
        state.pop("StructuredToParameterName@@", None)
        name = file.name.replace("model_state", "model").replace("pdparams", "safetensors")
        arrays = {key: np.ascontiguousarray(array) for key, array in state.items()}
        save_file(arrays, tmp_path / "x" / name, metadata={"format": "np"})
    assert contents(open_training(tmp_path / "x")) == contents(open_training(genuine))
    to_hf(tmp_path / "x", tmp_path / "hf")
    with np.load(FIXTURES / "tp2_llama" / "reference.npz") as reference:
        logits = logits_of(tmp_path / "hf", reference["input_ids"])
        assert np.abs(logits - reference["logits"]).max() < 1e-5 * np.abs(reference["logits"]).max()


def test_bfloat16_of_safetensors_ranks_is_kept(tmp_path: Path) -> None:
    model = {name: (array.view("u4") >> 16).astype("u2") for name, array in whole_model().items()}
    files = {f"model.tp{rank:02}.safetensors": cut(model, 2, rank, 2) for rank in range(2)}
    opened = open_training(safe(tmp_path / "x", files, tensor_parallel_degree=2))
    assert {tensor.dtype.name for tensor in opened.values()} == {"bfloat16"}
    assert opened["model.norm.weight"].read().tobytes() == model["llama.norm.weight"].tobytes()


def test_a_missing_rank_of_safetensors_is_reported(tmp_path: Path) -> None:
    files = {"model.tp00.safetensors": cut(whole_model(), 2, 0, 2)}
    with pytest.raises(InputRefused, match="lacks the files of 1 of 2 ranks"):
        open_training(safe(tmp_path / "x", files, tensor_parallel_degree=2))


def test_ranks_of_both_kinds_are_refused(tmp_path: Path) -> None:
    files = {f"model.tp{rank:02}.safetensors": cut(whole_model(), 2, rank, 2) for rank in range(2)}
    folder = safe(tmp_path / "x", files, tensor_parallel_degree=2)
    shutil.copy(FIXTURES / "llama_gqa_fp32" / "model_state.pdparams", folder / "model_state.tp00.pdparams")
    with pytest.raises(InputRefused, match="files of ranks, safetensors files of ranks"):
        open_training(folder)


def test_shards_of_paddles_safetensors_need_no_index(tmp_path: Path) -> None:
    model, names = whole_model(), sorted(whole_model())
    files = {f"model-0000{n + 1}-of-00002.safetensors": {k: model[k] for k in names[n::2]} for n in range(2)}
    folder = safe(tmp_path / "x", files)
    assert contents(open_training(folder)) == contents(open_training(save_whole(tmp_path / "one", model)))


def test_one_file_of_paddles_safetensors_takes_the_config_next_to_it(tmp_path: Path) -> None:
    folder = safe(tmp_path / "x", {"model.safetensors": whole_model()})
    assert contents(open_training(folder / "model.safetensors")) == contents(open_training(folder))


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


def test_paddles_safetensors_with_any_metadata_are_not_hugging_faces(tmp_path: Path) -> None:
    folder = save_whole(tmp_path / "x", whole_model())
    expected = contents(open_training(folder))
    (folder / "model_state.pdparams").unlink()
    save_file(whole_model(), folder / "model.safetensors", metadata={"format": "pt"})
    assert contents(open_training(folder)) == expected


def test_a_tied_head_as_paddle_3_saves_it_is_dropped(tmp_path: Path) -> None:
    model = whole_model()
    model["lm_head.weight"] = model["llama.embed_tokens.weight"].copy()
    checkpoint = settled(open_training(save_whole(tmp_path / "x", model, tie_word_embeddings=True)))
    assert "lm_head.weight" not in checkpoint
    assert checkpoint.config["tie_word_embeddings"] is True


def test_a_tied_head_is_found_where_the_config_leaves_it_out(tmp_path: Path) -> None:
    model = whole_model()
    model["lm_head.weight"] = model["llama.embed_tokens.weight"].copy()
    folder = save_whole(tmp_path / "x", model)
    (folder / "config.json").write_text(json.dumps({k: v for k, v in CONFIG.items() if k != "tie_word_embeddings"}))
    checkpoint = settled(open_training(folder))
    assert "lm_head.weight" not in checkpoint and checkpoint.config["tie_word_embeddings"] is True


def test_a_head_that_differs_from_its_embedding_is_kept_with_a_warning(tmp_path: Path) -> None:
    model = whole_model()
    model["lm_head.weight"] = model["llama.embed_tokens.weight"] + 1
    checkpoint = settled(open_training(save_whole(tmp_path / "x", model, tie_word_embeddings=True)))
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
    from llmconv.convert.formats.paddle.config import to_config  # noqa: PLC0415

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
