"""MindFormers checkpoints: genuine ones give upstream's logits, whatever the container; a wrong one a refusal."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from click.testing import CliRunner
from safetensors.numpy import load_file

from llmconv.checkpoint import open_checkpoint
from llmconv.cli import main
from llmconv.convert import to_hf
from llmconv.convert.models.config_file import read_config_file
from llmconv.convert.opening import open_training
from llmconv.errors import InputRefused, MalformedInput, OutputFailed, UnsupportedInput, UsageProblem
from llmconv.output.work import Finish, Part

Save = Callable[..., Path]

CASES: dict[str, dict[str, Any]] = {
    "mf102_gpt2": {},
    "mf102_llama_gqa": {},
    "mf132_bloom": {},
    "mf132_glm2": {},
    "mf132_llama_gqa": {},
    "mf132_llama_qkv_concat": {"qkv_layout": "plain"},
    "mf170_llama_qkv_concat": {"qkv_layout": "interleaved"},
}
CONFIGS = {
    "mf102_gpt2": "gpt2",
    "mf102_llama_gqa": "llama",
    "mf132_bloom": "bloom",
    "mf132_glm2": "glm",
    "mf132_llama_gqa": "llama",
}


def differ(ours: Any, theirs: Any) -> float:
    """The largest difference, relative to the largest logit."""
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


@pytest.mark.slow_rows("mf102_gpt2", "mf132_glm2")
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_upstream_model(
    mindformers: Path, tmp_path: Path, logits_of: Callable[..., Any], case: str
) -> None:
    folder = mindformers / case
    to_hf(folder / "model.ckpt", tmp_path / "hf", config=[folder / "run.yaml"], **CASES[case])
    with np.load(folder / "reference.npz") as reference:
        assert differ(logits_of(tmp_path / "hf", reference["input_ids"]), reference["logits"]) < 1e-5


@pytest.mark.parametrize(("file", "key"), [("base.ckpt", "logits_base"), ("full_with_lora.ckpt", "logits")])
def test_lora_is_merged_as_upstream_computes(
    mindformers: Path, tmp_path: Path, logits_of: Callable[..., Any], file: str, key: str
) -> None:
    folder = mindformers / "mf132_llama_lora"
    (tmp_path / "lora.json").write_text('{"lora_alpha": 8}')
    to_hf(folder / file, tmp_path / "hf", config=[folder / "run.yaml", tmp_path / "lora.json"])
    with np.load(folder / "reference.npz") as reference:
        assert differ(logits_of(tmp_path / "hf", reference["input_ids"]), reference[key]) < 1e-5


@pytest.mark.parametrize(("case", "model_type"), CONFIGS.items())
def test_the_only_run_configuration_next_to_the_file_is_used(mindformers: Path, case: str, model_type: str) -> None:
    checkpoint = open_training(mindformers / case / "model.ckpt")
    assert checkpoint.config["model_type"] == model_type
    assert checkpoint.config["architectures"][0].lower().startswith(model_type)
    assert any("that of `run.yaml`" in warning for warning in checkpoint.warnings)


def test_two_run_configurations_next_to_the_file_are_not_chosen_from(mindformers: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(mindformers / "mf102_llama_gqa", tmp_path / "x")
    (folder / "broken.yaml").write_text("x: [")
    assert open_training(folder / "model.ckpt").config["model_type"] == "llama"
    shutil.copy(folder / "run.yaml", folder / "other.yaml")
    with pytest.raises(InputRefused, match="no `num_heads`"):
        open_training(folder / "model.ckpt")


def test_the_layout_of_fused_matrices_is_asked_for_by_name(mindformers: Path) -> None:
    with pytest.raises(InputRefused, match="fused matrices") as refusal:
        open_training(mindformers / "mf170_llama_qkv_concat" / "model.ckpt")
    assert "--qkv-layout plain" in refusal.value.hint and "--qkv-layout interleaved" in refusal.value.hint


def test_the_option_means_nothing_to_other_formats(composer: Path) -> None:
    with pytest.raises(UsageProblem, match="--qkv-layout"):
        open_training(composer / "weights_only" / "ep0-ba2-rank0.pt", options={"qkv_layout": "plain"})


def test_the_command_takes_yaml_and_the_layout(mindformers: Path, tmp_path: Path) -> None:
    folder = mindformers / "mf170_llama_qkv_concat"
    options = ["--config", folder / "run.yaml", "--qkv-layout", "interleaved", "-o", tmp_path / "hf", "--json"]
    result = CliRunner().invoke(main, ["to-hf", str(folder / "model.ckpt"), *map(str, options)])
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["format"] == "mindformers"
    (step,) = json.loads((tmp_path / "hf" / "llmconv.json").read_text())["steps"]
    assert step["options"]["qkv_layout"] == "interleaved"


@pytest.mark.parametrize("name", ["tiny.ckpt", "tiny_crc.ckpt", "tiny.safetensors", "sh", "full"])
def test_every_container_gives_the_same_model(mindspore: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "sizes.json").write_text('{"num_heads": 2, "num_layers": 2}')
    to_hf(mindspore / name, tmp_path / "hf", config=[tmp_path / "sizes.json"])
    found = load_file(tmp_path / "hf" / "model.safetensors")
    with np.load(mindspore / "tiny.npz") as truth:
        assert np.array_equal(found["lm_head.weight"], truth["lm_head.weight"])
        query = truth["model.layers.1.attention.wq.weight"]
    assert np.array_equal(found["model.layers.1.self_attn.q_proj.weight"], query)


def test_lora_without_alpha_asks_for_it(mindformers: Path) -> None:
    with pytest.raises(InputRefused, match="`lora_alpha`"):
        open_training(mindformers / "mf132_llama_lora" / "full_with_lora.ckpt")


def test_lora_alone_is_refused(mindformers: Path) -> None:
    with pytest.raises(InputRefused, match="LoRA parameters only"):
        open_training(mindformers / "mf132_llama_lora" / "trainable_params.ckpt")


def test_an_encrypted_file_is_refused(mindspore: Path) -> None:
    with pytest.raises(UnsupportedInput, match="encrypted"):
        open_training(mindspore / "tiny_cbc.ckpt")


def test_chatglm_with_a_switch_that_glm_lacks_is_refused(mindformers: Path, tmp_path: Path) -> None:
    (tmp_path / "more.json").write_text('{"post_self_attn_layernorm": true}')
    run = read_config_file(mindformers / "mf132_glm2" / "run.yaml")
    run["model"]["model_config"]["post_self_attn_layernorm"] = True
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    with pytest.raises(UnsupportedInput, match="post_self_attn_layernorm"):
        open_training(mindformers / "mf132_glm2" / "model.ckpt", config=(tmp_path / "run.yaml",))


def test_a_missing_configuration_is_asked_for(mindformers: Path, tmp_path: Path) -> None:
    shutil.copy(mindformers / "mf102_llama_gqa" / "model.ckpt", tmp_path)
    with pytest.raises(InputRefused, match="no `num_heads`") as refusal:
        open_training(tmp_path / "model.ckpt")
    assert "--config run.yaml" in refusal.value.hint


def test_names_of_no_known_model_are_refused(tmp_path: Path, save_ckpt: Save) -> None:
    with pytest.raises(UnsupportedInput, match="of an unknown model: it holds `conv1.weight`"):
        open_training(save_ckpt(tmp_path / "x.ckpt", {"conv1.weight": np.zeros((2, 2))}))


def test_one_rank_of_several_is_refused_by_its_shapes(mindspore: Path, tmp_path: Path) -> None:
    shutil.copytree(mindspore / "sh" / "rank_0", tmp_path / "run" / "rank_0")
    (tmp_path / "sizes.json").write_text('{"num_heads": 2, "num_layers": 2}')
    with pytest.raises(MalformedInput, match="another shape than its configuration"):
        open_training(tmp_path / "run", config=(tmp_path / "sizes.json",))


# YAML


BAD_YAML = {
    "an object": ("x: !!python/object/apply:os.system ['true']", "not valid YAML"),
    "a broken one": ("x: [1,", "not valid YAML"),
    "aliases without end": (
        "a: &a [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1 or ''}, *a{i - 1 or ''}]\n" for i in range(1, 40)),
        "expand",
    ),
    "an alias of itself": ("a: &a [*a]", "not valid YAML"),
    "nested without end": ("[" * 100_000, "not valid YAML"),
    "a list": ("[1, 2]", "not a YAML mapping"),
    "far too long": ("a: " + "x" * (1 << 20), "too large"),
}


@pytest.mark.parametrize(("text", "reason"), BAD_YAML.values(), ids=BAD_YAML.keys())
def test_bad_yaml_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(MalformedInput, match=reason):
        read_config_file(tmp_path / "run.yaml")


def test_the_output_is_a_folder_that_opens(mindformers: Path, tmp_path: Path) -> None:
    to_hf(mindformers / "mf102_llama_gqa" / "model.ckpt", tmp_path / "hf")
    assert open_checkpoint(tmp_path / "hf").config["rms_norm_eps"] == 1e-5


def test_inspect_lists_a_file_that_needs_more_options_to_convert(mindspore: Path, mindformers: Path) -> None:
    result = CliRunner().invoke(main, ["inspect", "--json", str(mindspore / "sh")])
    found = json.loads(result.stdout)
    assert (found["format"], found["tensors"], found["model_type"]) == ("mindformers", 21, None)
    assert "`num_heads`" in found["warnings"][0] and found["file_bytes"] == 2 * 7769
    whole = CliRunner().invoke(main, ["inspect", "--json", str(mindformers / "mf132_glm2" / "model.ckpt")])
    assert json.loads(whole.stdout)["model_type"] == "glm"


def test_inspect_refuses_unreadable_files(mindspore: Path) -> None:
    result = CliRunner().invoke(main, ["inspect", str(mindspore / "tiny_cbc.ckpt")])
    assert result.exit_code == 3 and "encrypted" in result.stderr


@pytest.mark.parametrize("is_found", [False, True], ids=["given", "next to the file"])
def test_parts_of_other_settings_are_not_mixed(mindformers: Path, tmp_path: Path, is_found: bool) -> None:
    checkpoint, run = (shutil.copy(mindformers / "mf132_llama_lora" / name, tmp_path) for name in LORA)
    settings = yaml.safe_load(Path(run).read_text())
    given = [] if is_found else [run, tmp_path / "lora.json"]

    def write(alpha: int, **work: Any) -> None:
        (tmp_path / "lora.json").write_text(json.dumps({"lora_alpha": alpha}))
        if is_found:
            settings["model"]["model_config"]["pet_config"] = {"lora_rank": 4, "lora_alpha": alpha}
            Path(run).write_text(yaml.dump(settings))
        to_hf(checkpoint, tmp_path / "out", config=given, max_shard_size="20KB", **work)

    write(8, work=Part(0, 2))
    write(99, work=Part(1, 2))
    with pytest.raises(OutputFailed, match=r"shards of .* are missing"):
        write(99, work=Finish())


LORA = ("full_with_lora.ckpt", "run.yaml")
