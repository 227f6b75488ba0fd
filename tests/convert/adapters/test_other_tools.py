"""Adapters that mlx-lm, torchtune and LitGPT wrote: the merged model has the logits of the program's adapted one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file, save_file

from llmconv.checkpoint import SINGLE, open_checkpoint
from llmconv.convert import merge_lora, to_hf
from llmconv.convert.adapters.lora_config import REFUSED
from llmconv.convert.formats import adapter_format, adapter_formats
from llmconv.convert.formats.mlx import open_mlx_adapter
from llmconv.convert.inspection import inspect
from llmconv.errors import InputRefused, MalformedInput, UnsupportedInput, UsageProblem

FIXTURES = Path(__file__).parents[2] / "fixtures" / "adapters"
BASES = ("qwen3_moe", "llama_tied", "gpt_neox", "mixtral", "qwen2", "gemma", "phi3", "gpt2", "llama")
CASES = [
    *(f"mlx/{name}" for name in ("llama_lora", "llama_lora_last_layer_keys", "llama_tied_embedding", "llama_full")),
    *(f"mlx/{name}" for name in ("mixtral_lora", "qwen3_moe_lora", "gpt2_lora", "phi3_lora")),
    *(f"torchtune/{name}" for name in ("llama_lora", "qwen2_lora", "gemma_lora")),
    *(f"litgpt/{name}" for name in ("llama_lora", "phi3_lora", "gpt_neox_lora")),
]
DORA = pytest.mark.skipif("use_dora" in REFUSED, reason="DoRA is refused")
Judge = Callable[..., Any]


def base_of(case: str) -> Path:
    """The model that a case adapts."""
    return FIXTURES / "bases" / next(name for name in BASES if case.partition("/")[2].startswith(name))


def assert_merged_as_upstream(case: str, adapter: Path, output: Path, logits_of: Judge, **options: Any) -> None:
    merge_lora(base_of(case), [adapter], output, **options)
    with np.load(FIXTURES / case / "reference.npz") as reference:
        logits, largest = logits_of(output, reference["input_ids"]), np.abs(reference["logits"]).max()
        assert np.abs(logits - reference["logits"]).max() < 1e-5 * largest
        assert np.abs(logits - reference["logits_base"]).max() > 0.1 * largest


@pytest.mark.slow_rows("mlx/mixtral_lora", "torchtune/gemma_lora", "litgpt/gpt_neox_lora")
@pytest.mark.parametrize("case", CASES)
def test_the_merged_model_has_the_logits_of_the_adapted_one(case: str, tmp_path: Path, logits_of: Judge) -> None:
    assert_merged_as_upstream(case, FIXTURES / case, tmp_path / "merged", logits_of)


@DORA
@pytest.mark.parametrize("case", ["mlx/llama_dora", "torchtune/llama_dora"])
def test_dora_is_merged_as_upstream_computes_it(case: str, tmp_path: Path, logits_of: Judge) -> None:
    assert_merged_as_upstream(case, FIXTURES / case, tmp_path / "merged", logits_of)


def test_an_adapter_without_alpha_takes_the_one_that_is_given(tmp_path: Path, logits_of: Judge) -> None:
    case = "torchtune/phi3_lora"
    with pytest.raises(InputRefused, match="but not their `lora_alpha`") as refused:
        merge_lora(base_of(case), [FIXTURES / case], tmp_path / "merged")
    assert "--alpha" in refused.value.hint
    assert not (tmp_path / "merged").exists()
    assert_merged_as_upstream(case, FIXTURES / case, tmp_path / "merged", logits_of, alpha=8.0)


@pytest.mark.parametrize("case", ["torchtune/llama_lora", "torchtune/qwen2_lora"])
def test_what_torchtune_wrote_for_peft_is_read_in_its_own_names(case: str, tmp_path: Path, logits_of: Judge) -> None:
    copy = FIXTURES / case / "adapter_model.safetensors"
    assert_merged_as_upstream(case, copy, tmp_path / "merged", logits_of)


def test_what_torchtune_wrote_for_peft_alone_is_an_adapter_of_peft(tmp_path: Path, logits_of: Judge) -> None:
    case = "torchtune/llama_lora"
    folder = shutil.copytree(FIXTURES / case, tmp_path / "adapter")
    (folder / "adapter_model.pt").unlink()
    assert adapter_format(folder) is None
    assert_merged_as_upstream(case, folder, tmp_path / "merged", logits_of)


def test_an_earlier_checkpoint_of_mlx_is_named_by_its_file(tmp_path: Path, logits_of: Judge) -> None:
    folder = shutil.copytree(FIXTURES / "mlx/llama_lora", tmp_path / "adapter")
    (folder / "adapters.safetensors").rename(folder / "0000100_adapters.safetensors")
    assert_merged_as_upstream("mlx/llama_lora", folder / "0000100_adapters.safetensors", tmp_path / "out", logits_of)


def test_lora_on_a_tied_embedding_reaches_the_head_too(tmp_path: Path) -> None:
    case = "mlx/llama_tied_embedding"
    merge_lora(base_of(case), [FIXTURES / case], tmp_path / "merged")
    merged = open_checkpoint(tmp_path / "merged")
    assert merged.config["tie_word_embeddings"]
    assert "lm_head.weight" not in merged


def test_two_kinds_are_merged_in_one_pass(tmp_path: Path) -> None:
    base = base_of("mlx/llama_lora")
    merge_lora(base, [FIXTURES / "mlx/llama_lora", FIXTURES / "torchtune/llama_lora"], tmp_path / "both")
    merge_lora(base, [FIXTURES / "mlx/llama_lora"], tmp_path / "one")
    merge_lora(tmp_path / "one", [FIXTURES / "torchtune/llama_lora"], tmp_path / "two")
    both, two = (load_file(tmp_path / name / "model.safetensors") for name in ("both", "two"))
    assert all(np.allclose(both[name], two[name], atol=1e-6) for name in both)


@pytest.mark.parametrize("case", [*CASES, "mlx/llama_dora", "torchtune/llama_dora", "torchtune/phi3_lora"])
def test_one_kind_and_no_other_claims_an_adapter(case: str) -> None:
    assert [name for name, kind in adapter_formats().items() if kind.detect(FIXTURES / case)] == [
        case.partition("/")[0]
    ]


def mlx(folder: Path, source: str = "llama_lora", **changes: Any) -> Path:
    """An mlx-lm adapter with other fields in its config; None takes one away."""
    shutil.copytree(FIXTURES / "mlx" / source, folder)
    config = json.loads((folder / "adapter_config.json").read_text()) | changes
    (folder / "adapter_config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return folder


def parameters(**changes: Any) -> dict[str, Any]:
    return {"lora_parameters": {"rank": 4, "scale": 5.0, "dropout": 0.0, **changes}}


def test_the_older_formula_of_mlx_is_asked_for(tmp_path: Path, logits_of: Judge) -> None:
    adapter = mlx(tmp_path / "adapter", **parameters(alpha=16.0))
    with pytest.raises(UsageProblem) as refused:
        merge_lora(base_of("mlx/llama_lora"), [adapter], tmp_path / "merged")
    assert "--alpha 80" in refused.value.hint
    assert "--alpha 20" in refused.value.hint
    assert_merged_as_upstream("mlx/llama_lora", adapter, tmp_path / "merged", logits_of, alpha=20.0)


@pytest.mark.parametrize(("fields", "weight"), [({"rank": 4, "alpha": 5.0, "dropout": 0.0}, 1.0), ({"rank": 4}, 50.0)])
def test_the_first_kind_of_mlx_vlm_is_scaled_by_alpha_alone(
    fields: dict[str, Any], weight: float, tmp_path: Path, logits_of: Judge
) -> None:
    """The factors are mlx-lm's, whose scale is 5; alpha is not divided by the rank, and 0.1 if there is none."""
    case, adapter = "mlx/llama_lora", tmp_path / "adapter"
    adapter.mkdir()
    parts = {"lora_a": "A", "lora_b": "B"}
    factors = {Path(name): tensor for name, tensor in load_file(FIXTURES / case / "adapters.safetensors").items()}
    renamed = {f"{name.stem}.{parts[name.suffix[1:]]}": tensor for name, tensor in factors.items()}
    save_file(renamed, adapter / "adapters.safetensors")
    (adapter / "adapter_config.json").write_text(json.dumps(fields))
    assert_merged_as_upstream(case, adapter, tmp_path / "merged", logits_of, weights=[weight])


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"fine_tune_type": "adapter"}, UnsupportedInput, "fine_tune_type"),
        ({"fine_tune_type": ["lora"]}, UnsupportedInput, "fine_tune_type"),
        ({"lora_parameters": None}, MalformedInput, "lora_parameters"),
        (parameters(rank=3), MalformedInput, "rank"),
        (parameters(rank=True), MalformedInput, "rank"),
        (parameters(scale=0), MalformedInput, "scale"),
        (parameters(scale="20"), MalformedInput, "scale"),
        (parameters(scale=10**400), MalformedInput, "scale"),
        (parameters(alpha=[1]), MalformedInput, "alpha"),
        (parameters(scale=None), InputRefused, "lora_alpha"),
    ],
)
def test_a_config_of_mlx_that_is_damaged_is_refused(
    tmp_path: Path, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    adapter = mlx(tmp_path / "adapter", **changes)
    with pytest.raises(error, match=message):
        merge_lora(base_of("mlx/llama_lora"), [adapter], tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def rewrite(file: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    save_file(change(load_file(file)), file)


def test_half_a_pair_is_refused_by_its_module(tmp_path: Path) -> None:
    adapter = mlx(tmp_path / "adapter")
    lost = "model.layers.1.mlp.up_proj.lora_b"
    rewrite(adapter / "adapters.safetensors", lambda tensors: {k: v for k, v in tensors.items() if k != lost})
    with pytest.raises(MalformedInput, match=r"lacks B of `model\.layers\.1\.mlp\.up_proj`"):
        merge_lora(base_of("mlx/llama_lora"), [adapter], tmp_path / "merged")


def test_a_module_that_the_base_has_not_is_named_with_the_closest(tmp_path: Path) -> None:
    adapter = mlx(tmp_path / "adapter")
    rewrite(
        adapter / "adapters.safetensors",
        lambda tensors: {
            name.replace("layers.1.mlp.up_proj", "layers.1.mlp.upper"): one for name, one in tensors.items()
        },
    )
    with pytest.raises(MalformedInput, match=r"layers\.1\.mlp\.upper\.weight` \(close: .*mlp\.up_proj"):
        merge_lora(base_of("mlx/llama_lora"), [adapter], tmp_path / "merged")


def test_values_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    adapter = mlx(tmp_path / "adapter")
    rewrite(adapter / "adapters.safetensors", lambda tensors: {k: v * np.float32("inf") for k, v in tensors.items()})
    with pytest.raises(MalformedInput, match="not finite"):
        merge_lora(base_of("mlx/llama_lora"), [adapter], tmp_path / "merged")


def test_whole_weights_of_a_model_that_mlx_keeps_otherwise_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedInput, match=r"whole weights .* of a gpt2"):
        merge_lora(base_of("mlx/gpt2_lora"), [FIXTURES / "mlx/llama_full"], tmp_path / "merged")


def test_an_update_of_weights_that_mlx_multiplied_is_refused(tmp_path: Path) -> None:
    base = Path(shutil.copytree(base_of("mlx/llama_lora"), tmp_path / "base"))
    config = json.loads((base / "config.json").read_text()) | {"model_type": "falcon_h1"}
    (base / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedInput, match="is of a falcon_h1, whose multipliers"):
        open_mlx_adapter(FIXTURES / "mlx/llama_lora", open_checkpoint(base))


@pytest.mark.parametrize("kind", ["jamba", "nemotron_h"])
def test_experts_of_mlx_have_the_names_of_the_files(kind: str, tmp_path: Path) -> None:
    """As `sanitize` of mlx-lm's `jamba.py` and `nemotron_h.py` stacks them."""
    module, names = {
        "jamba": ("model.layers.1.feed_forward.switch_mlp.up_proj", "model.layers.1.feed_forward.experts.{}.up_proj"),
        "nemotron_h": ("backbone.layers.1.mixer.switch_mlp.fc2", "backbone.layers.1.mixer.experts.{}.down_proj"),
    }[kind]
    random = np.random.default_rng(0)
    first, second = (random.standard_normal(shape).astype(np.float32) for shape in ((3, 2, 8), (3, 6, 2)))
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text(json.dumps({"model_type": kind}))
    save_file({f"{names.format(one)}.weight": np.ones((6, 8), np.float32) for one in range(3)}, base / SINGLE)
    adapter = mlx(tmp_path / "adapter", **parameters(rank=2, scale=3.0))
    save_file({f"{module}.lora_a": first, f"{module}.lora_b": second}, adapter / "adapters.safetensors")
    found = open_mlx_adapter(adapter, open_checkpoint(base))
    assert sorted(found.pairs) == [names.format(one) for one in range(3)]
    for one in range(3):
        pair = found.pairs[names.format(one)]
        assert np.array_equal(pair.a.read(), first[one]) and np.array_equal(pair.b.read(), second[one])
        assert found.config.scale(names.format(one), 2) == 3.0


def test_dora_of_mlx_on_an_embedding_is_refused(tmp_path: Path) -> None:
    adapter = mlx(tmp_path / "adapter", "llama_tied_embedding", fine_tune_type="dora")
    magnitude = {"model.embed_tokens.m": np.ones(32, "f4")}
    rewrite(adapter / "adapters.safetensors", lambda tensors: {**tensors, **magnitude})
    with pytest.raises(UnsupportedInput, match=r"DoRA on the embedding `model\.embed_tokens`"):
        merge_lora(base_of("mlx/llama_tied_embedding"), [adapter], tmp_path / "merged")


@pytest.mark.parametrize("base", ["mixtral", "gpt2"])
def test_a_base_whose_rows_torchtune_orders_in_no_known_way_is_refused(tmp_path: Path, base: str) -> None:
    with pytest.raises(UnsupportedInput, match=f"the base is a {base}"):
        merge_lora(FIXTURES / "bases" / base, [FIXTURES / "torchtune/llama_lora"], tmp_path / "merged")


def test_an_adapter_of_another_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        MalformedInput,
        match=r"shape mismatch for `model\.layers\.0\.self_attn\.q_proj\.weight`.*\[16, 16\], got \[32, 16\]",
    ):
        merge_lora(FIXTURES / "bases/gemma", [FIXTURES / "torchtune/llama_lora"], tmp_path / "merged")


def test_a_truncated_file_of_torchtune_is_refused_by_its_name(tmp_path: Path) -> None:
    folder = shutil.copytree(FIXTURES / "torchtune/llama_lora", tmp_path / "adapter")
    file = folder / "adapter_model.pt"
    file.write_bytes(file.read_bytes()[:-500])
    with pytest.raises(MalformedInput, match=r"adapter_model\.pt"):
        merge_lora(base_of("mlx/llama_lora"), [folder], tmp_path / "merged")


def test_several_epochs_of_torchtune_in_one_folder_are_not_chosen_from(tmp_path: Path) -> None:
    source = FIXTURES / "torchtune/llama_lora"
    for number in (0, 1):
        shutil.copy(source / "adapter_model.pt", tmp_path / f"adapter_{number}.pt")
    shutil.copy(source / "adapter_config.json", tmp_path)
    with pytest.raises(InputRefused, match=r"2 adapters: adapter_0\.pt, adapter_1\.pt"):
        merge_lora(base_of("mlx/llama_lora"), [tmp_path], tmp_path / "merged")
    assert merge_lora(base_of("mlx/llama_lora"), [tmp_path / "adapter_1.pt"], tmp_path / "merged").merged


def lit(folder: Path, **changes: Any) -> Path:
    """LitGPT's adapter with other hyperparameters."""
    shutil.copytree(FIXTURES / "litgpt/llama_lora", folder)
    file = folder / "hyperparameters.yaml"
    file.write_text(yaml.dump(yaml.safe_load(file.read_text()) | changes))
    return folder


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora_key": True}, "rows, which do not match lora_query, lora_key, lora_value"),
        ({"lora_r": 4}, "rank 4, its tensors have rank 2"),
        ({"lora_alpha": 0}, "lora_alpha"),
        ({"lora_alpha": "16"}, "lora_alpha"),
    ],
)
def test_hyperparameters_of_another_run_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(MalformedInput, match=message):
        merge_lora(base_of("litgpt/llama_lora"), [lit(tmp_path / "lora", **changes)], tmp_path / "merged")


def test_the_rows_of_a_padded_vocabulary_are_left_out(tmp_path: Path) -> None:
    folder = lit(tmp_path / "lora")
    whole = open_checkpoint(base_of("litgpt/llama_lora"))
    smaller = {name: tensor.read() for name, tensor in whole.items()}
    smaller |= {name: smaller[name][:30] for name in ("lm_head.weight", "model.embed_tokens.weight")}
    (tmp_path / "base").mkdir()
    save_file(smaller, tmp_path / "base" / "model.safetensors")
    (tmp_path / "base" / "config.json").write_text(json.dumps({**whole.config, "vocab_size": 30}))
    merge_lora(tmp_path / "base", [folder], tmp_path / "small")
    merge_lora(base_of("litgpt/llama_lora"), [folder], tmp_path / "large")
    small, large = (load_file(tmp_path / name / "model.safetensors")["lm_head.weight"] for name in ("small", "large"))
    assert np.array_equal(small, large[:30])


def test_a_litgpt_adapter_of_another_family_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedInput, match="trained on a llama, the base is a gpt_neox"):
        merge_lora(FIXTURES / "bases/gpt_neox", [FIXTURES / "litgpt/llama_lora"], tmp_path / "merged")


@pytest.mark.parametrize("name", ["lit_model.pth.adapter_v2", "lit_model.pth.adapter"])
def test_prompts_of_litgpt_are_no_lora(name: str, tmp_path: Path) -> None:
    folder = shutil.copytree(FIXTURES / "litgpt/llama_lora", tmp_path / "final")
    (folder / "lit_model.pth.lora").rename(folder / name)
    for path in (folder, folder / name):
        with pytest.raises(UnsupportedInput, match="is a LLaMA-Adapter of LitGPT"):
            merge_lora(base_of("litgpt/llama_lora"), [path], tmp_path / "merged")
        with pytest.raises(UnsupportedInput, match="is a LLaMA-Adapter of LitGPT"):
            to_hf(path, tmp_path / "merged")


@pytest.mark.parametrize("case", ["mlx/llama_lora", "torchtune/llama_lora", "litgpt/llama_lora"])
def test_to_hf_of_an_adapter_names_the_command_that_merges_it(case: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedInput, match="adapter|LoRA") as refused:
        to_hf(FIXTURES / case, tmp_path / "out")
    assert f"llmconv merge-lora BASE {FIXTURES / case} -o OUT" in refused.value.hint


@pytest.mark.slow
def test_inspect_reads_an_adapter_of_mlx() -> None:
    found = inspect(FIXTURES / "mlx/llama_lora")
    assert (found.format, len(found.tensors)) == ("adapter", 28)


def test_an_adapter_of_lycoris_is_named(tmp_path: Path) -> None:
    name = "lycoris_model_layers_0_self_attn_q_proj.lokr_w1"
    save_file({name: np.ones((2, 2), np.float32)}, tmp_path / "lokr.safetensors")
    with pytest.raises(InputRefused, match=f"is an adapter of LyCORIS .`{name}`"):
        merge_lora(FIXTURES / "bases/llama", [tmp_path / "lokr.safetensors"], tmp_path / "out")
