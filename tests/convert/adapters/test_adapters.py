"""Adapters that must be refused: one clear error each, before anything is written."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from llmconv.cli import main
from llmconv.convert import merge_lora
from llmconv.errors import InputRefused, LlmconvError, MalformedInput, UnsupportedInput, UsageProblem
from tests.builders.hf_models import SMALLEST, smallest_shapes

Q = "layers.0.self_attn.q_proj"
PREFIX = f"base_model.model.model.{Q}"
CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 4}


@pytest.fixture
def base(save_tensors: Callable[..., Path]) -> Path:
    """A llama of one layer, all ones."""
    tensors = {name: torch.ones(shape) for name, shape in smallest_shapes().items()}
    return save_tensors("base", tensors, {"config.json": SMALLEST})


@pytest.fixture
def attempt(base: Path, save_tensors: Callable[..., Path], tmp_path: Path) -> Callable[..., LlmconvError]:
    """`attempt(tensor changes, config changes)` merges and returns the error; nothing may be left behind."""

    def run(tensors: dict[str, Any] | None = None, alpha: float | None = None, **config: Any) -> LlmconvError:
        plain = {f"{PREFIX}.lora_A.weight": torch.ones(2, 4), f"{PREFIX}.lora_B.weight": torch.ones(6, 2)}
        kept = {name: value for name, value in (plain | (tensors or {})).items() if value is not None}
        files = {"adapter_config.json": CONFIG | config}
        adapter = save_tensors("adapter", kept, files, weights="adapter_model.safetensors")
        with pytest.raises(LlmconvError) as caught:
            merge_lora(base, [adapter], tmp_path / "out", alpha=alpha)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base"]
        assert "\n" not in caught.value.message and caught.value.hint
        return caught.value

    return run


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("use_dora", True),
        ("alora_invocation_tokens", [1, 2]),
        ("arrow_config", {"top_k": 3}),
        ("use_qalora", True),
        ("kasa_config", {"beta": 1}),
        ("megatron_config", {"tp": 2}),
        ("init_lora_weights", "pissa"),
        ("init_lora_weights", "pissa_niter_16"),
        ("init_lora_weights", "olora"),
        ("init_lora_weights", "corda"),
        ("init_lora_weights", "loftq"),
        ("init_lora_weights", "lora_ga"),
        ("peft_type", "XLORA"),
        ("peft_type", "PREFIX_TUNING"),
        ("peft_type", None),
    ],
)
def test_an_unsupported_field_is_named(field: str, value: Any, attempt: Callable[..., LlmconvError]) -> None:
    error = attempt(**{field: value})
    assert isinstance(error, UnsupportedInput)
    assert f"`{field}`" in error.message


@pytest.mark.parametrize("alpha", [0, -1, float("nan"), float("inf"), "8", True])
def test_an_alpha_that_merges_nothing_is_refused(alpha: Any, attempt: Callable[..., LlmconvError]) -> None:
    assert "`lora_alpha`" in attempt(lora_alpha=alpha).message


def test_an_alpha_pattern_of_zero_is_refused(attempt: Callable[..., LlmconvError]) -> None:
    assert "`alpha_pattern`" in attempt(alpha_pattern={"q_proj": 0}).message


def test_a_pattern_that_is_no_regular_expression_is_refused(attempt: Callable[..., LlmconvError]) -> None:
    assert "q_proj(" in attempt(rank_pattern={"q_proj(": 2}).message


def test_the_option_alpha_may_not_contradict_the_file(attempt: Callable[..., LlmconvError]) -> None:
    assert isinstance(attempt(alpha=5.0), UsageProblem)


def test_a_rank_that_the_tensors_do_not_have_is_refused(attempt: Callable[..., LlmconvError]) -> None:
    message = attempt(rank_pattern={"q_proj": 3}).message
    assert "rank 3" in message and "rank 2" in message


def test_an_adapter_for_another_base_names_both_shapes(attempt: Callable[..., LlmconvError]) -> None:
    error = attempt({f"{PREFIX}.lora_B.weight": torch.ones(5, 2)})
    assert isinstance(error, MalformedInput)
    assert "[5, 4]" in error.message and "[6, 4]" in error.message


def test_a_misnamed_factor_shows_both_incomplete_modules(attempt: Callable[..., LlmconvError]) -> None:
    other = PREFIX.replace("q_proj", "p_proj")
    error = attempt({f"{PREFIX}.lora_A.weight": None, f"{other}.lora_A.weight": torch.ones(2, 4)})
    assert re.search(r"lacks B of `\S*p_proj`, A of `\S*q_proj` \(missing keys\)", error.message)


def test_a_tensor_that_matches_nothing_lists_the_close_names(attempt: Callable[..., LlmconvError]) -> None:
    other = PREFIX.replace("q_proj", "p_proj")
    error = attempt({f"{other}.lora_A.weight": torch.ones(2, 4), f"{other}.lora_B.weight": torch.ones(6, 2)})
    assert "p_proj.weight" in error.message
    assert "close: `" in error.message and f"`model.{Q}.weight`" in error.message


def test_a_whole_tensor_that_matches_nothing_is_refused(attempt: Callable[..., LlmconvError]) -> None:
    assert "score.weight" in attempt({"base_model.model.score.weight": torch.ones(2, 4)}).message


def test_a_whole_tensor_of_another_shape_is_refused(attempt: Callable[..., LlmconvError]) -> None:
    message = attempt({"base_model.model.model.layers.0.self_attn.k_proj.weight": torch.ones(3, 4)}).message
    assert "[3, 4]" in message and "[2, 4]" in message


@pytest.mark.parametrize("part", ["A", "B"])
def test_half_a_pair_is_refused(part: str, attempt: Callable[..., LlmconvError]) -> None:
    assert f"lacks {part} of" in attempt({f"{PREFIX}.lora_{part}.weight": None}).message


def test_a_tensor_that_plain_lora_does_not_have_is_refused(attempt: Callable[..., LlmconvError]) -> None:
    error = attempt({f"{PREFIX}.lora_magnitude_vector": torch.ones(6)})
    assert isinstance(error, UnsupportedInput)
    assert "lora_magnitude_vector" in error.message


def test_two_adapters_in_one_file_are_refused(attempt: Callable[..., LlmconvError]) -> None:
    assert "twice" in attempt({f"{PREFIX}.lora_A.second.weight": torch.ones(2, 4)}).message


def test_a_fused_expert_is_refused(attempt: Callable[..., LlmconvError]) -> None:
    assert isinstance(attempt({f"{PREFIX}.lora_A.weight": torch.ones(2, 4, 3)}), UnsupportedInput)


def test_an_adapter_saved_before_it_was_gathered_is_refused(attempt: Callable[..., LlmconvError]) -> None:
    assert "gathered" in attempt({f"{PREFIX}.lora_B.weight": torch.ones(0)}).message


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused(value: float, attempt: Callable[..., LlmconvError]) -> None:
    assert "not finite" in attempt({f"{PREFIX}.lora_A.weight": torch.full((2, 4), value)}).message


def test_an_integer_adapter_is_refused(attempt: Callable[..., LlmconvError]) -> None:
    ones = torch.ones(2, 4, dtype=torch.int8)
    assert isinstance(attempt({f"{PREFIX}.lora_A.weight": ones}), UnsupportedInput)


def test_a_bias_of_b_for_a_layer_without_bias_is_refused(attempt: Callable[..., LlmconvError]) -> None:
    other = PREFIX.replace("self_attn.q_proj", "mlp.up_proj")
    pair = {f"{other}.lora_A.weight": torch.ones(2, 4), f"{other}.lora_B.weight": torch.ones(2, 2)}
    assert "has a bias for" in attempt(pair | {f"{other}.lora_B.bias": torch.ones(2)}).message


def test_a_sum_too_large_for_float16_is_refused(base: Path, save_tensors: Callable[..., Path], tmp_path: Path) -> None:
    tensors = {
        f"{PREFIX}.lora_A.weight": torch.full((2, 4), 300.0),
        f"{PREFIX}.lora_B.weight": torch.full((6, 2), 300.0),
    }
    adapter = save_tensors("large", tensors, {"adapter_config.json": CONFIG}, weights="adapter_model.safetensors")
    with pytest.raises(UnsupportedInput, match="too large for float16"):
        merge_lora(base, [adapter], tmp_path / "out", dtype="float16")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "large"]


def test_a_quantized_base_is_refused(base: Path, attempt: Callable[..., LlmconvError]) -> None:
    (base / "config.json").write_text(json.dumps(SMALLEST | {"quantization_config": {"bits": 4}}))
    assert "quantized" in attempt().message


@pytest.mark.parametrize(
    ("missing", "named"),
    [("adapter_config.json", "not a PEFT adapter"), ("adapter_model.safetensors", "no adapter weights")],
)
def test_a_missing_file_is_named(
    missing: str, named: str, base: Path, save_tensors: Callable[..., Path], tmp_path: Path
) -> None:
    files = {"adapter_config.json": CONFIG}
    adapter = save_tensors("adapter", {f"{PREFIX}.lora_A.weight": torch.ones(2, 4)}, files, "adapter_model.safetensors")
    (adapter / missing).unlink()
    with pytest.raises(InputRefused, match=named):
        merge_lora(base, [adapter], tmp_path / "out")


def test_a_delta_and_a_file_for_graphs_are_told_their_command(base: Path, tmp_path: Path) -> None:
    (tmp_path / "delta").mkdir()
    (tmp_path / "delta/delta.json").write_text("{}")
    with pytest.raises(InputRefused, match="is a delta") as refusal:
        merge_lora(base, [tmp_path / "delta"], tmp_path / "out")
    assert "llmconv delta apply" in refusal.value.hint
    (tmp_path / "style.onnx_adapter").write_bytes(b"x")
    with pytest.raises(InputRefused, match="an adapter for graphs"):
        merge_lora(base, [tmp_path / "style.onnx_adapter"], tmp_path / "out")


def test_several_adapters_in_folders_are_named(base: Path, tmp_path: Path) -> None:
    for name in ("default", "style"):
        (tmp_path / "many" / name).mkdir(parents=True)
        (tmp_path / "many" / name / "adapter_config.json").write_text("{}")
    with pytest.raises(InputRefused) as caught:
        merge_lora(base, [tmp_path / "many"], tmp_path / "out")
    assert "style, default" in caught.value.hint


@pytest.fixture
def adapter(save_tensors: Callable[..., Path]) -> Path:
    """An adapter that fits `base`."""
    tensors = {f"{PREFIX}.lora_A.weight": torch.ones(2, 4), f"{PREFIX}.lora_B.weight": torch.ones(6, 2)}
    return save_tensors("adapter", tensors, {"adapter_config.json": CONFIG}, weights="adapter_model.safetensors")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--weight", "1", "--weight", "2"], "2 weight(s)"),
        (["--weight", "nan"], "not finite"),
        (["--max-shard-size", "5 apples"], "5 apples"),
    ],
)
def test_options_that_make_no_sense_exit_with_2(
    options: list[str], named: str, base: Path, adapter: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    result = CliRunner().invoke(main, ["merge-lora", str(base), str(adapter), "-o", str(out), *options])
    assert result.exit_code == 2
    assert named in result.stderr and "hint:" in result.stderr
    assert not out.exists()


def test_an_output_that_exists_exits_with_3(base: Path, adapter: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    result = CliRunner().invoke(main, ["merge-lora", str(base), str(adapter), "-o", str(tmp_path / "out")])
    assert result.exit_code == 3
    assert "--overwrite" in result.stderr


def test_a_dry_run_prints_the_plan_and_writes_nothing(base: Path, adapter: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["merge-lora", str(base), str(adapter), "-o", str(tmp_path / "out"), "--dry-run"])
    assert result.exit_code == 0
    assert "disk needed: 488 bytes" in result.stdout
    assert f"  model.{Q}.weight  float32  [6, 4]  merged" in result.stdout
    assert not (tmp_path / "out").exists()


def test_json_names_what_was_merged(base: Path, adapter: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["merge-lora", str(base), str(adapter), "-o", str(tmp_path / "out"), "--json"])
    content = json.loads(result.stdout)
    assert content["merged"] == [f"model.{Q}.weight"]
    assert content["tensors"] == 15 and content["bytes"] == 488 and content["written"] is True


def test_alpha_completes_a_config_without_one(base: Path, save_tensors: Callable[..., Path], tmp_path: Path) -> None:
    tensors = {f"{PREFIX}.lora_A.weight": torch.ones(2, 4), f"{PREFIX}.lora_B.weight": torch.ones(6, 2)}
    config = {"peft_type": "LORA", "r": 2}
    adapter = save_tensors("bare", tensors, {"adapter_config.json": config}, weights="adapter_model.safetensors")
    merge = merge_lora(base, [adapter], tmp_path / "out", alpha=16)
    assert not merge.edits.warnings
    assert merge.plan.checkpoint[f"model.{Q}.weight"].read().tolist() == [[17.0] * 4] * 6


def test_a_config_without_r_and_alpha_has_pefts_defaults(
    base: Path, save_tensors: Callable[..., Path], tmp_path: Path
) -> None:
    tensors = {f"{PREFIX}.lora_A.weight": torch.ones(2, 4), f"{PREFIX}.lora_B.weight": torch.ones(6, 2)}
    files = {"adapter_config.json": {"peft_type": "LORA"}}
    adapter = save_tensors("bare", tensors, files, weights="adapter_model.safetensors")
    merge = merge_lora(base, [adapter], tmp_path / "out")
    assert "default 8" in merge.warnings[0]
    assert merge.plan.checkpoint[f"model.{Q}.weight"].read().tolist() == [[9.0] * 4] * 6


def test_an_unknown_field_is_reported(base: Path, adapter: Path, tmp_path: Path) -> None:
    (adapter / "adapter_config.json").write_text(json.dumps(CONFIG | {"use_novelty": True}))
    assert "`use_novelty`" in merge_lora(base, [adapter], tmp_path / "out").warnings[0]


def test_two_adapters_that_replace_one_tensor_are_refused(
    base: Path, save_tensors: Callable[..., Path], tmp_path: Path
) -> None:
    whole = {f"base_model.model.model.{Q}.bias": torch.zeros(6)}
    files = {"adapter_config.json": CONFIG}
    adapters = [save_tensors(name, whole, files, weights="adapter_model.safetensors") for name in ("one", "two")]
    with pytest.raises(MalformedInput, match="another adapter replaces too"):
        merge_lora(base, adapters, tmp_path / "out")


def test_names_that_could_be_two_tensors_are_refused(
    save_tensors: Callable[..., Path], adapter: Path, tmp_path: Path
) -> None:
    tensors = {f"{part}.{Q}.weight": torch.ones(6, 4) for part in ("model.text", "model.vision")}
    base = save_tensors("two", tensors, {"config.json": {"model_type": "both"}})
    with pytest.raises(MalformedInput, match=r"could be `model\.text.*` or `model\.vision"):
        merge_lora(base, [adapter], tmp_path / "out")


@pytest.mark.parametrize(
    "name",
    [
        *("non_lora_trainables.bin", "trainable_params.bin", "new_embeddings.safetensors", "vit.safetensors"),
        *("mm_projector.bin", "model.safetensors"),
    ],
)
def test_weights_next_to_an_adapter_are_not_left_out_silently(
    name: str, base: Path, adapter: Path, tmp_path: Path
) -> None:
    (adapter / name).write_bytes(b"whatever a trainer saved")
    with pytest.raises(UnsupportedInput, match=rf"contains other weights.*`{name}`") as refusal:
        merge_lora(base, [adapter], tmp_path / "out")
    assert "adapter_model.safetensors" in refusal.value.hint
    merge_lora(base, [adapter / "adapter_model.safetensors"], tmp_path / "out")


@pytest.mark.parametrize("label", ["", ".default"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_second_copy_of_the_adapter_next_to_it_is_ignored(
    label: str, dtype: torch.dtype, base: Path, adapter: Path, tmp_path: Path
) -> None:
    """What accelerate saves of an FSDP run: the trained tensors alone, as PEFT names them in files or in memory."""
    own = load_file(adapter / "adapter_model.safetensors")
    copy = {name.replace(".weight", f"{label}.weight"): value.to(dtype) for name, value in own.items()}
    torch.save(copy, adapter / "pytorch_model_fsdp.bin")
    assert merge_lora(base, [adapter], tmp_path / "out").warnings == ()


@pytest.mark.parametrize("change", ["another value", "another tensor"])
def test_a_copy_with_something_else_is_not_ignored(change: str, base: Path, adapter: Path, tmp_path: Path) -> None:
    own = load_file(adapter / "adapter_model.safetensors")
    name, value = next(iter(own.items()))
    torch.save(
        {**own, (name if change == "another value" else "vit.weight"): value + 1}, adapter / "pytorch_model_fsdp.bin"
    )
    with pytest.raises(UnsupportedInput, match="contains other weights.*`pytorch_model_fsdp.bin`"):
        merge_lora(base, [adapter], tmp_path / "out")


def test_the_state_of_training_next_to_an_adapter_is_ignored(base: Path, adapter: Path, tmp_path: Path) -> None:
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "rng_state_0.pth", "training_args.bin", "scaler.pt"):
        (adapter / name).write_bytes(b"")
    assert merge_lora(base, [adapter], tmp_path / "out").warnings == ()


def test_a_value_head_is_left_out_by_name(base: Path, adapter: Path, tmp_path: Path) -> None:
    (adapter / "value_head.safetensors").write_bytes(b"")
    (warning,) = merge_lora(base, [adapter], tmp_path / "out").warnings
    assert "`value_head.safetensors` is left out" in warning


def test_an_adapter_that_changes_nothing_is_reported(
    base: Path, adapter: Path, save_tensors: Callable[..., Path], tmp_path: Path
) -> None:
    tensors = {f"{PREFIX}.lora_A.weight": torch.ones(2, 4), f"{PREFIX}.lora_B.weight": torch.zeros(6, 2)}
    files = {"adapter_config.json": CONFIG}
    untrained = save_tensors("untrained", tensors, files, weights="adapter_model.safetensors")
    (warning,) = merge_lora(base, [adapter, untrained], tmp_path / "out").warnings
    assert "`untrained` changes nothing: its factors are zero" in warning


def test_a_merge_that_changes_nothing_is_reported(
    base: Path, save_tensors: Callable[..., Path], tmp_path: Path
) -> None:
    whole = {f"base_model.model.model.{Q}.bias": torch.ones(6)}
    config = {"peft_type": "IA3", "target_modules": ["q_proj"], "feedforward_modules": []}
    tensors = {f"{PREFIX}.ia3_l": torch.ones(6, 1)} | whole
    same = save_tensors("same", tensors, {"adapter_config.json": config}, weights="adapter_model.safetensors")
    for dtype in ("keep", "bfloat16"):
        (warning,) = merge_lora(base, [same], tmp_path / dtype, dtype=dtype).warnings
        assert "the merge changes nothing" in warning


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_factors_alone_in_a_file_of_a_model_are_an_adapter(
    base: Path, save_tensors: Callable[..., Path], tmp_path: Path, name: str
) -> None:
    factors = {f"{PREFIX}.lora_A.default.weight": torch.ones(2, 4), f"{PREFIX}.lora_B.default.weight": torch.ones(6, 2)}
    folder = save_tensors("trained", factors, {"adapter_config.json": CONFIG}, weights="model.safetensors")
    if name.endswith(".bin"):
        (folder / "model.safetensors").unlink()
        torch.save(factors, folder / name)
    merge_lora(base, [folder], tmp_path / "out")
    merged = load_file(tmp_path / "out/model.safetensors")[f"model.{Q}.weight"]
    assert torch.equal(merged, torch.full_like(merged, 5))  # 1 + alpha/r · 2


@pytest.mark.parametrize("shape", [(0,), (0, 4)])
def test_a_whole_module_that_was_not_gathered_is_refused(
    attempt: Callable[..., LlmconvError], shape: tuple[int, ...]
) -> None:
    empty = {"base_model.model.lm_head.weight": torch.ones(shape)}
    error = attempt(empty, modules_to_save=["lm_head"])
    assert isinstance(error, MalformedInput) and "saved before it was gathered" in error.message


@pytest.mark.parametrize("module", ["lm_head", "embed_tokens", "norm", "mlp"])
def test_a_module_that_was_trained_as_a_whole_and_is_not_saved_is_named(
    attempt: Callable[..., LlmconvError], module: str
) -> None:
    error = attempt(modules_to_save=[module, "score"])
    assert isinstance(error, MalformedInput) and f"({module})" in error.message
    assert "adapter_config.json" in error.hint


def test_heads_that_peft_names_for_classifiers_need_not_be_there(
    base: Path, save_tensors: Callable[..., Path], tmp_path: Path
) -> None:
    factors = {f"{PREFIX}.lora_A.weight": torch.ones(2, 4), f"{PREFIX}.lora_B.weight": torch.ones(6, 2)}
    files = {"adapter_config.json": CONFIG | {"modules_to_save": ["classifier", "score"]}}
    merge_lora(base, [save_tensors("adapter", factors, files, weights="adapter_model.safetensors")], tmp_path / "out")
