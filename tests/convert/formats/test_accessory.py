"""LLaMA2-Accessory: genuine checkpoints give upstream's logits, any split the same tensors, a wrong set a refusal."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from transformers import AutoModelForCausalLM, FalconConfig, FalconForCausalLM

from llmconv.checkpoint import Checkpoint, open_checkpoint
from llmconv.cli import main
from llmconv.convert import to_hf
from llmconv.convert.formats.meta import split_dim
from llmconv.convert.models.head_and_dtype import settled, with_cast
from llmconv.convert.opening import open_training
from llmconv.errors import InputRefused, MalformedInput, UsageProblem
from tests.builders.accessory_models import (
    DELTA,
    FIXTURES,
    ROWS,
    Model,
    change,
    contents,
    cut,
    llama,
    mixtral,
    save,
    trained,
    write_whole,
)

LEGACY = FIXTURES / "legacy_llama_peft_mp2_trainable"
PLAIN = FIXTURES / "llama_mp2_bf16"

LEGACY_OPTIONS: dict[str, Any] = {
    "config": (LEGACY / "params.json", LEGACY / "llamaPeft_normBiasLora.json"),
    "tokenizer": LEGACY / "tokenizer.model",
    "base": LEGACY / "base",
}
APPLIED_OPTIONS: dict[str, Any] = {
    "config": (DELTA / "base" / "params.json",),
    "tokenizer": DELTA / "base" / "tokenizer.model",
}
CASES: dict[str, tuple[Path, dict[str, Any]]] = {
    "llama": (PLAIN, {}),
    "llama_peft": (FIXTURES / "llama_peft_normBiasLora_mp2", {"dtype": "float32"}),
    "trained parameters only, old layout": (LEGACY / "epoch0", {"dtype": "float32"} | LEGACY_OPTIONS),
    "applied delta, old layout": (DELTA / "applied", APPLIED_OPTIONS),
    "mixtral": (FIXTURES / "mixtral_mp2_bf16", {}),
    "mixtral_sparse": (FIXTURES / "mixtral_sparse_mp1_bf16", {}),
    "internlm": (FIXTURES / "internlm_mp1_bf16", {}),
    "falcon": (FIXTURES / "falcon7b_mp2_bf16", {}),
}


@pytest.mark.slow
@pytest.mark.parametrize(("source", "options"), CASES.values(), ids=CASES.keys())
def test_logits_are_those_of_the_upstream_model(
    tmp_path: Path, logits_of: Callable[..., Any], source: Path, options: dict[str, Any]
) -> None:
    to_hf(source, tmp_path / "hf", **options)
    folder = source if (source / "reference.npz").is_file() else source.parent
    with np.load(folder / "reference.npz") as reference:
        short = logits_of(tmp_path / "hf", reference["tokens"])
        assert np.abs(short - reference["logits"]).max() < 1e-5 * np.abs(reference["logits"]).max()
        long = logits_of(tmp_path / "hf", reference["tokens_long"])[:, -8:]
        assert np.abs(long - reference["logits_long"]).max() < 1e-5 * np.abs(reference["logits_long"]).max()


@pytest.mark.slow
def test_logits_of_a_fine_tuned_model_are_its_own(tmp_path: Path, logits_of: Callable[..., Any]) -> None:
    to_hf(DELTA / "finetuned", tmp_path / "hf")
    with np.load(DELTA / "reference.npz") as reference:
        logits = logits_of(tmp_path / "hf", reference["tokens"])
        assert np.abs(logits - reference["logits_finetuned"]).max() < 1e-5


@pytest.mark.slow
def test_a_lora_merged_in_bfloat16_is_off_by_its_rounding_only(tmp_path: Path, logits_of: Callable[..., Any]) -> None:
    source = FIXTURES / "llama_peft_normBiasLora_mp2"
    to_hf(source, tmp_path / "hf")
    with np.load(source / "reference.npz") as reference:
        error = np.abs(logits_of(tmp_path / "hf", reference["tokens"]) - reference["logits"]).max()
    assert 1e-4 < error < 0.1  # without the LoRA it would be 1.1


def test_the_config_agrees_with_the_files() -> None:
    config = open_training(PLAIN).config
    assert (config["vocab_size"], config["intermediate_size"], config["num_key_value_heads"]) == (512, 192, 4)
    assert (config["max_position_embeddings"], config["rope_theta"], config["rope_scaling"]) == (1024, 1e4, None)
    assert (config["bos_token_id"], config["eos_token_id"], config["attention_bias"]) == (1, 2, False)


def test_ids_come_from_a_hugging_face_tokenizer_too() -> None:
    opened = open_training(FIXTURES / "falcon7b_mp2_bf16")
    assert (opened.config["bos_token_id"], opened.config["eos_token_id"]) == (0, 0)
    assert set(opened.side_files) == {"tokenizer.json", "tokenizer_config.json"}


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(st.sampled_from([2, 4]), st.sampled_from([0, 2]), st.sets(st.sampled_from(sorted(ROWS))))
def test_any_number_of_shards_gives_the_same_tensors(
    tmp_path_factory: pytest.TempPathFactory, count: int, rank: int, biases: set[str]
) -> None:
    folder = tmp_path_factory.mktemp("split")
    model = llama(rank=rank, biases=tuple(sorted(biases)))
    one, many = save(folder / "one", model), save(folder / "many", model, count)
    assert contents(many) == contents(one)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_experts_are_gathered_from_all_shards(tmp_path: Path, count: int) -> None:
    model = mixtral()
    opened = open_training(save(tmp_path / "x", model, count, "mixtral"))
    for expert in range(4):
        stored = opened[f"model.layers.1.block_sparse_moe.experts.{expert}.w2.weight"].read()
        assert np.array_equal(stored, model[f"layers.1.feed_forward.experts.{expert}.w2.weight"].numpy())


def fused(model: Model, count: int, number: int) -> Model:
    """The mixtral as `mixtral_sparse` has it in one rank: its part of every expert in one matrix, w2 transposed."""
    parts = {name: cut(name, tensor, count, number) for name, tensor in model.items() if ".experts." not in name}
    for block in (f"layers.{layer}.feed_forward" for layer in range(2)):
        for name in ("w1", "w2", "w3"):
            whole = [model[f"{block}.experts.{expert}.{name}.weight"] for expert in range(4)]
            turned = [matrix.T if name == "w2" else matrix for matrix in whole]
            parts[f"{block}.{name}"] = torch.cat([matrix.chunk(count)[number] for matrix in turned])
    return {name: part for name, part in parts.items() if part is not None}


@pytest.mark.parametrize("count", [1, 2])
def test_both_layouts_of_experts_give_the_same_tensors(tmp_path: Path, count: int) -> None:
    model = mixtral()
    one = save(tmp_path / "one", model, 1, "mixtral")
    sparse = save(tmp_path / "sparse", {}, 0, "mixtral_sparse")
    for number in range(count):
        content = {f"llma.{name}": part.clone() for name, part in fused(model, count, number).items()}
        torch.save({"model": content}, sparse / f"consolidated.{number:02}-of-{count:02}.model.pth")
    assert contents(sparse) == contents(one)


@pytest.mark.parametrize(("dtype", "numpy"), [("keep", ml_dtypes.bfloat16), ("float16", np.float16), ("float32", "f4")])
def test_a_lora_is_added_with_scale_one_and_rounded_once(tmp_path: Path, dtype: str, numpy: Any) -> None:
    model = llama(rank=2, dtype=torch.bfloat16)
    merged = with_cast(open_training(save(tmp_path / "x", model, 2)), dtype)["model.layers.1.mlp.down_proj.weight"]
    weight, a, b = (
        model[f"layers.1.feed_forward.w2.{part}"].double().numpy()
        for part in ("weight", "lora_a.weight", "lora_b.weight")
    )
    assert np.array_equal(merged.read(), (weight + b @ a).astype(numpy))


def test_biases_of_queries_and_their_lora_are_permuted_like_the_weights(tmp_path: Path) -> None:
    model = llama(rank=2, biases=("wq",))
    opened = open_training(save(tmp_path / "x", model))
    order = [0, 2, 1, 3]
    bias = opened["model.layers.0.self_attn.q_proj.bias"].read()
    assert np.array_equal(bias[4:8], model["layers.0.attention.wq.bias"].numpy()[4:8][order])
    weight, a, b = (
        model[f"layers.0.attention.wq.{part}"].numpy() for part in ("weight", "lora_a.weight", "lora_b.weight")
    )
    merged = opened["model.layers.0.self_attn.q_proj.weight"].read()
    np.testing.assert_allclose(merged[4:8], (weight + b @ a)[4:8][order], rtol=1e-5, atol=1e-5)


def test_layers_without_a_bias_get_zeros_where_others_have_one(tmp_path: Path) -> None:
    opened = open_training(save(tmp_path / "x", llama(biases=("wq", "wo")), plugin="llama_adapter"))
    assert (opened.config["attention_bias"], opened.config["mlp_bias"]) == (True, False)
    assert not opened["model.layers.1.self_attn.v_proj.bias"].read().any()
    assert opened["model.layers.1.self_attn.o_proj.bias"].read().all()
    assert not any("mlp" in name and "bias" in name for name in opened)


def test_positions_are_stretched_by_the_inverse_of_rope_scaling(tmp_path: Path) -> None:
    to_hf(save(tmp_path / "x", llama(), rope_scaling=0.25), tmp_path / "hf")
    assert open_checkpoint(tmp_path / "hf").config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    rotary = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").model.rotary_emb
    np.testing.assert_allclose(rotary.inv_freq.numpy(), np.array([1.0, 0.01]) / 4)


FALCONS: dict[str, dict[str, Any]] = {
    "one key head": {"multi_query": True, "new_decoder_architecture": False},
    "a key head per head": {"multi_query": False, "new_decoder_architecture": False, "bias": True},
    "one after the other": {"multi_query": True, "new_decoder_architecture": False, "parallel_attn": False},
    "newer": {"multi_query": True, "new_decoder_architecture": True, "num_kv_heads": 1},
    "newer, a key head per head": {"multi_query": False, "new_decoder_architecture": True, "num_kv_heads": 4},
}


@pytest.mark.parametrize("kind", FALCONS.values(), ids=FALCONS.keys())
def test_every_kind_of_falcon_is_fused_as_transformers_takes_it_apart(tmp_path: Path, kind: dict[str, Any]) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "vocab_size": 24}
    falcon = FalconForCausalLM(FalconConfig(num_hidden_layers=2, tie_word_embeddings=False, **sizes, **kind))
    shards = [split_falcon(falcon, kind, number) for number in range(2)]
    folder = save(tmp_path / "x", {}, 0, "falcon", num_layers=2, **sizes, **kind, rope_scaling=None)
    for number, shard in enumerate(shards):
        torch.save({"model": shard}, folder / f"consolidated.{number:02}-of-02.model.pth")
    opened, expected = open_training(folder), falcon.state_dict()
    assert set(opened) == set(expected)
    assert all(np.array_equal(opened[name].read(), tensor.numpy()) for name, tensor in expected.items())


def split_falcon(falcon: FalconForCausalLM, kind: dict[str, Any], number: int) -> Model:
    """One of two shards, q, k and v taken apart by the model's own code."""
    shard = {}
    attention = falcon.transformer.h[0].self_attention
    for name, tensor in falcon.state_dict().items():
        owner = name.replace("transformer.h.", "layers.").replace("transformer.", "").replace("lm_head", "output")
        parts = {owner: tensor}
        if ".query_key_value." in owner:
            columns = tensor.T.reshape(1, -1, len(tensor)) if tensor.ndim == 2 else tensor.reshape(1, 1, -1)
            trio = [part.reshape(columns.shape[1], -1, 8) for part in attention._split_heads(columns)]
            if kind["new_decoder_architecture"] and kind["num_kv_heads"] == 1:
                trio[1:] = [part[:, :1] for part in trio[1:]]  # there it repeats them for every head
            matrices = [part.flatten(1).T if tensor.ndim == 2 else part.flatten() for part in trio]
            parts = {
                owner.replace("query_key_value", f"w{x}"): matrix for x, matrix in zip("qkv", matrices, strict=True)
            }
        for part, whole in parts.items():
            repeated = ("wk", "wv") if kind["multi_query"] else ()
            dim = split_dim(part, repeated)
            shard[f"llma.{part}"] = (whole if dim is None else whole.chunk(2, dim)[number]).clone()
    return shard


# What was trained alone


def test_trained_parameters_need_a_base(tmp_path: Path) -> None:
    folder = save(tmp_path / "x", trained(llama(rank=2)))
    with pytest.raises(
        InputRefused, match="`x` is not a whole model: it holds only the 33 tensors that were trained"
    ) as refusal:
        open_training(folder)
    assert "`--base`" in refusal.value.hint


@pytest.mark.parametrize("kind", ["accessory", "meta"])
def test_a_base_completes_the_trained_tensors_with_any_number_of_shards(tmp_path: Path, kind: str) -> None:
    model = llama(rank=2, biases=("wq", "w2"))
    base = save(
        tmp_path / "base",
        {name: torch.ones(32) if name in trained(model) else model[name] for name in llama()},
        4,
    )
    if kind == "meta":
        for number in range(4):
            shard = torch.load(base / f"consolidated.{number:02}-of-04.model.pth")["model"]
            torch.save(
                {name.removeprefix("llma."): part for name, part in shard.items()},
                base / f"consolidated.{number:02}.pth",
            )
            (base / f"consolidated.{number:02}-of-04.model.pth").unlink()
    tuned, whole = save(tmp_path / "tuned", trained(model), 2), save(tmp_path / "whole", model)
    assert contents(tuned, base=str(base)) == contents(whole)


def test_the_command_takes_a_base(tmp_path: Path) -> None:
    files = [option for path in LEGACY_OPTIONS["config"] for option in ("--config", str(path))]
    args = [
        "to-hf",
        str(LEGACY / "epoch0"),
        *files,
        "--base",
        str(LEGACY / "base"),
        "-o",
        str(tmp_path / "hf"),
        "--json",
    ]
    result = CliRunner().invoke(main, args)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["format"] == "accessory"
    assert json.loads((tmp_path / "hf" / "llmconv.json").read_text())["steps"][0]["options"]["base"] == "base"


def test_a_base_of_another_model_is_refused(tmp_path: Path) -> None:
    tuned = save(tmp_path / "tuned", trained(llama(rank=2)))
    other = {name: tensor.repeat(*[2] * tensor.ndim) for name, tensor in llama().items()}
    base = save(tmp_path / "base", other, dim=64)
    with pytest.raises(MalformedInput, match="shape mismatch"):
        open_training(tuned, options={"base": str(base)})


def test_options_that_mean_nothing_to_a_format_are_a_usage_error(tmp_path: Path) -> None:
    meta = FIXTURES.parent / "meta" / "llama2_gqa_mp2_bf16"
    with pytest.raises(UsageProblem, match="`--drop` does not apply to the format `meta`"):
        to_hf(meta, tmp_path / "hf", drop=True)


# Tokenizers and configurations


def test_a_missing_tokenizer_is_a_warning_and_can_be_given(tmp_path: Path) -> None:
    folder = save(tmp_path / "model" / "epoch0", llama())
    assert any("has no tokenizer" in warning for warning in open_training(folder).warnings)
    opened = open_training(folder, tokenizer=PLAIN / "tokenizer.model")
    assert "tokenizer.json" in opened.side_files and opened.config["bos_token_id"] == 1


def test_a_configuration_is_needed_and_can_be_given(tmp_path: Path) -> None:
    folder = save(tmp_path / "x", llama())
    given = (folder / "config.json").rename(tmp_path / "params.json")
    (folder / "meta.json").unlink()
    with pytest.raises(MalformedInput, match="`x` has no configuration with `dim`"):
        open_training(folder)
    (tmp_path / "more.json").write_text('{"max_seq_len": 77, "initializer_range": 0.5, "auto_map": {"x": "y.z"}}')
    opened = open_training(folder, config=(given, tmp_path / "more.json"))
    assert (opened.config["max_position_embeddings"], opened.config["initializer_range"]) == (77, 0.5)
    assert "auto_map" not in opened.config and any("auto_map" in warning for warning in opened.warnings)


def test_a_head_that_equals_the_embedding_is_tied(tmp_path: Path) -> None:
    model = llama()
    model["output.weight"] = model["tok_embeddings.weight"].clone()
    opened = settled(open_training(save(tmp_path / "x", model, 2)))
    assert "lm_head.weight" not in opened and opened.config["tie_word_embeddings"] is True


def test_buffers_of_rope_are_dropped(tmp_path: Path) -> None:
    model = llama() | {"rope.freqs": torch.ones(2)}
    assert contents(write_whole(tmp_path / "x", model, "llama")) == contents(save(tmp_path / "y", llama()))


def test_norms_that_differ_between_shards_are_a_warning(tmp_path: Path) -> None:
    folder = save(tmp_path / "x", llama(), 2)
    change(folder / "consolidated.01-of-02.model.pth", **{"llma.norm.weight": torch.ones(32)})
    assert any("norms differ" in warning for warning in open_training(folder).warnings)


def test_reading_in_blocks_is_reading_whole(tmp_path: Path) -> None:
    opened: Checkpoint = open_training(FIXTURES / "mixtral_sparse_mp1_bf16")
    tensor = opened["model.layers.0.block_sparse_moe.experts.2.w2.weight"]
    blocks = [tensor.rows(start, min(start + 5, 64)) for start in range(0, 64, 5)]
    assert np.array_equal(np.concatenate(blocks).view("u2"), tensor.read().view("u2"))
