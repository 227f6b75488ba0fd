"""to-hf of models with code of their own: the code travels along, and runs only with consent."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file

from llmconv.checkpoint import open_checkpoint
from llmconv.cli import main
from llmconv.convert import apply_delta, extract_delta, from_hf, merge_lora, to_hf
from llmconv.convert.inspection import inspect
from llmconv.errors import MalformedInput, UnsupportedInput, UsageProblem
from llmconv.export import INPUT_MAPS, InputMap, export, register_input_map
from llmconv.generation import generate
from llmconv.verify import verify
from tests.builders.dcp_folders import save as save_dcp
from tests.builders.own_code import AUTO_MAP, CONFIG, composer, loaded, logits_of, random_model, save_code
from tests.builders.talking import save_letters
from tests.stores.bucket import Bucket

TRACE = "from pathlib import Path\nPath(__file__).with_name('ran').write_text('')\n"
pytestmark = pytest.mark.usefixtures("modules_cache")

FILES = {"configuration_magpie.py", "modeling_magpie.py"}


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """A folder with the code and configuration of a magpie."""
    return save_code(tmp_path / "code")


@pytest.fixture
def model(code: Path) -> Any:
    """A magpie with random weights."""
    return random_model(code)


@pytest.fixture
def run(tmp_path: Path, model: Any) -> Path:
    """A Composer checkpoint of it, without code."""
    return composer(tmp_path / "ep0-ba2-rank0.pt", model, CONFIG)


def traced(folder: Path) -> Path:
    """The folder, with code that leaves a file when it runs."""
    (folder / "modeling_magpie.py").write_text((folder / "modeling_magpie.py").read_text() + TRACE)
    return folder


@pytest.mark.slow
def test_a_composer_checkpoint_becomes_a_folder_with_its_code_and_logits(
    run: Path, code: Path, model: Any, tmp_path: Path
) -> None:
    to_hf(run, tmp_path / "hf", code=code, trust_remote_code=True)
    assert torch.equal(logits_of(loaded(tmp_path / "hf")), logits_of(model))
    manifest = json.loads((tmp_path / "hf/llmconv.json").read_text())
    assert manifest["files"].keys() >= FILES and manifest["steps"][0]["options"]["trust_remote_code"] is True


def test_code_next_to_the_given_configuration_is_found(run: Path, code: Path, tmp_path: Path) -> None:
    plan = to_hf(run, tmp_path / "hf", config=[code], trust_remote_code=True, dry_run=True)
    assert plan.small_files.keys() >= FILES and plan.checkpoint.config["auto_map"] == AUTO_MAP


@pytest.mark.slow
def test_code_next_to_the_checkpoint_is_found(code: Path, model: Any, tmp_path: Path) -> None:
    torch.save({"model": {f"module.{name}": one for name, one in model.state_dict().items()}}, code / "last.pt")
    to_hf(code / "last.pt", tmp_path / "hf", trust_remote_code=True)
    assert torch.equal(logits_of(loaded(tmp_path / "hf")), logits_of(model))


@pytest.mark.slow
def test_safetensors_in_the_names_of_the_code_are_converted(code: Path, model: Any, tmp_path: Path) -> None:
    save_file({f"lit.{name}": one for name, one in model.state_dict().items()}, tmp_path / "weights.safetensors")
    to_hf(tmp_path / "weights.safetensors", tmp_path / "hf", code=code, trust_remote_code=True)
    assert torch.equal(logits_of(loaded(tmp_path / "hf")), logits_of(model))


def test_a_distributed_checkpoint_is_converted(code: Path, model: Any, tmp_path: Path) -> None:
    save_dcp(tmp_path / "dcp", {"model": dict(model.state_dict())})
    to_hf(tmp_path / "dcp", tmp_path / "hf", code=code, root="model", trust_remote_code=True)
    assert torch.equal(logits_of(loaded(tmp_path / "hf")), logits_of(model))


def test_a_folder_is_rewritten_with_its_code(code: Path, model: Any, tmp_path: Path) -> None:
    save_file(model.state_dict(), code / "model.safetensors")
    to_hf(code, tmp_path / "half", dtype="bfloat16", trust_remote_code=True)
    opened = open_checkpoint(tmp_path / "half")
    assert opened.config["auto_map"] == AUTO_MAP and {one.dtype.name for one in opened.values()} == {"bfloat16"}
    assert {path.name for path in (tmp_path / "half").iterdir()} >= FILES


@pytest.mark.slow
def test_the_converted_folder_is_exported_verified_and_generates(
    run: Path, code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmconv.export.families.INPUT_MAPS", dict(INPUT_MAPS))
    register_input_map("magpie", InputMap(position_ids=False))
    words = save_letters(tmp_path / "words")
    to_hf(run, tmp_path / "hf", code=code, tokenizer=words, trust_remote_code=True)
    export(tmp_path / "hf", trust_remote_code=True)
    assert verify(tmp_path / "hf", suite="quick", trust_remote_code=True)
    asked: dict[str, Any] = {"max_new_tokens": 4, "trust_remote_code": True}
    found = [generate(tmp_path / "hf", ["a b"], backend=one, **asked).completions for one in ("onnx", "torch")]
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # of PEFT with transformers 5
def test_a_merge_copies_the_code_and_does_not_run_it(code: Path, model: Any, tmp_path: Path) -> None:
    config = LoraConfig(r=2, target_modules=["to_queries", "mix"], init_lora_weights=False)
    save_file(model.state_dict(), code / "model.safetensors")
    tuned = get_peft_model(model, config)
    tuned.save_pretrained(tmp_path / "adapter")
    expected = logits_of(tuned.merge_and_unload())
    traced(code)
    merge_lora(code, tmp_path / "adapter", tmp_path / "merged")
    assert not (code / "ran").exists()
    torch.testing.assert_close(logits_of(loaded(tmp_path / "merged")), expected)


@pytest.mark.slow
def test_an_exact_delta_carries_the_code_of_the_tuned_model(code: Path, model: Any, tmp_path: Path) -> None:
    save_file(model.state_dict(), code / "model.safetensors")
    tuned = traced(Path(shutil.copytree(code, tmp_path / "tuned")))
    extract_delta(code, tuned, tmp_path / "delta")
    apply_delta(code, tmp_path / "delta", tmp_path / "back")
    assert (tmp_path / "back/modeling_magpie.py").read_text().endswith(TRACE)
    assert not [*tmp_path.rglob("ran")]


def test_an_added_delta_keeps_the_code_of_the_base(code: Path, model: Any, tmp_path: Path) -> None:
    save_file(model.state_dict(), code / "model.safetensors")
    delta = save_code(tmp_path / "delta", auto_map={"AutoModelForCausalLM": "evil.Evil"})
    save_file({name: 1e-3 * one for name, one in model.state_dict().items()}, delta / "model.safetensors")
    plan = apply_delta(code, delta, tmp_path / "sum", dry_run=True).plan
    assert plan.checkpoint.config["auto_map"] == AUTO_MAP and plan.small_files.keys() >= FILES


def test_from_hf_refuses_a_model_with_its_own_code(code: Path, model: Any, tmp_path: Path) -> None:
    save_file(model.state_dict(), code / "model.safetensors")
    with pytest.raises(UnsupportedInput, match="has code of its own"):
        from_hf(code, tmp_path / "out", to="meta")


def test_buffers_that_no_weights_contain_are_a_warning(code: Path, model: Any, tmp_path: Path) -> None:
    file = code / "modeling_magpie.py"
    added = 'self.post_init()\n        self.register_buffer("table", torch.ones(2), persistent=False)'
    file.write_text(file.read_text().replace("self.post_init()", added))
    torch.save(model.state_dict(), code / "last.pt")
    plan = to_hf(code / "last.pt", tmp_path / "hf", trust_remote_code=True, dry_run=True)
    assert any("`table`, which no weights contain" in warning for warning in plan.checkpoint.warnings)


def test_an_output_in_a_bucket_contains_the_code(run: Path, code: Path, bucket: Bucket) -> None:
    to_hf(run, f"{bucket}/out", code=code, trust_remote_code=True)
    assert bucket.files().keys() >= FILES


@pytest.mark.parametrize("options", [[], ["--code", "code"]])
def test_without_consent_nothing_runs(run: Path, code: Path, tmp_path: Path, options: list[str]) -> None:
    traced(code)
    given = [str(code) if option == "code" else option for option in options]
    result = CliRunner().invoke(main, ["to-hf", str(run), "-o", str(tmp_path / "hf"), "--config", str(code), *given])
    assert result.exit_code == (2 if options else 3) and "--trust-remote-code" in result.stderr
    assert not (code / "ran").exists() and not (tmp_path / "hf").exists()


def test_consent_that_the_configuration_claims_is_none(run: Path, code: Path, tmp_path: Path) -> None:
    (traced(code) / "config.json").write_text(json.dumps({**CONFIG, "trust_remote_code": True}))
    with pytest.raises(UnsupportedInput, match="unsupported model_type `magpie`"):
        to_hf(run, tmp_path / "hf", config=[code])
    assert not (code / "ran").exists()


def test_inspect_lists_the_code_and_does_not_run_it(code: Path, model: Any) -> None:
    save_file(model.state_dict(), traced(code) / "model.safetensors")
    assert {*inspect(code).code} == FILES
    result = CliRunner().invoke(main, ["inspect", str(code)])
    assert "custom code   configuration_magpie.py, modeling_magpie.py (not executed)" in result.stdout
    assert not (code / "ran").exists()


def test_missing_and_unexpected_keys_are_named(code: Path, model: Any, tmp_path: Path) -> None:
    state = {name.replace("norm.weight", "norm.gain"): one for name, one in model.state_dict().items()}
    torch.save(state, code / "last.pt")
    with pytest.raises(MalformedInput, match=r"missing keys: `norm\.weight`; unexpected keys: `norm\.gain`"):
        to_hf(code / "last.pt", tmp_path / "hf", trust_remote_code=True)


def test_another_shape_is_named(code: Path, model: Any, tmp_path: Path) -> None:
    torch.save({**model.state_dict(), "norm.bias": torch.zeros(7)}, code / "last.pt")
    with pytest.raises(MalformedInput, match=r"shape mismatch for `norm\.bias`"):
        to_hf(code / "last.pt", tmp_path / "hf", trust_remote_code=True)


@pytest.mark.parametrize(
    ("auto_map", "message"),
    [
        ({"AutoModelForCausalLM": "org/repo--modeling_magpie.MagpieForCausalLM"}, "another repository"),
        ({"AutoModelForCausalLM": "../modeling_magpie.MagpieForCausalLM"}, "which is not in"),
        ({**AUTO_MAP, "AutoModelForCausalLM": "modeling_magpie.NoSuch"}, "has no such class"),
    ],
)
def test_a_class_that_is_elsewhere_is_refused(
    code: Path, model: Any, tmp_path: Path, auto_map: Any, message: str
) -> None:
    torch.save(model.state_dict(), code / "last.pt")
    (code / "config.json").write_text(json.dumps({**CONFIG, "auto_map": auto_map}))
    with pytest.raises(MalformedInput, match=message):
        to_hf(code / "last.pt", tmp_path / "hf", trust_remote_code=True)


def test_the_given_folder_stands_for_another_repository(run: Path, model: Any, tmp_path: Path) -> None:
    remote = {kind: f"org/repo--{name}" for kind, name in AUTO_MAP.items()}
    folder = save_code(tmp_path / "copy", auto_map=remote)
    to_hf(run, tmp_path / "hf", code=folder, trust_remote_code=True)
    assert open_checkpoint(tmp_path / "hf").config["auto_map"] == AUTO_MAP


def test_code_of_another_model_is_refused(run: Path, tmp_path: Path) -> None:
    folder = save_code(tmp_path / "other", model_type="jackdaw")
    with pytest.raises(MalformedInput, match="that of a `jackdaw`, and .* is a `magpie`"):
        to_hf(run, tmp_path / "hf", code=folder, trust_remote_code=True)


@pytest.mark.parametrize(
    ("code_text", "message"),
    [("import a_package_of_long_ago", "No module named 'a_package_of_long_ago'"), ("1 / 0", "ZeroDivisionError")],
)
def test_code_that_fails_gives_one_line(run: Path, code: Path, tmp_path: Path, code_text: str, message: str) -> None:
    (code / "modeling_magpie.py").write_text(code_text)
    with pytest.raises(UnsupportedInput, match=message) as refused:
        to_hf(run, tmp_path / "hf", code=code, trust_remote_code=True)
    assert "install what it imports" in refused.value.hint


def test_formats_without_own_code_refuse_the_option(meta: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageProblem, match="`--trust-remote-code` does not apply to the format `meta`"):
        to_hf(next(meta.iterdir()), tmp_path / "hf", format="meta", trust_remote_code=True)


@pytest.mark.slow
def test_the_code_of_a_native_type_is_dropped_without_consent(code: Path, model: Any, tmp_path: Path) -> None:
    save_file(model.state_dict(), code / "model.safetensors")
    plan = to_hf(code, tmp_path / "half", dtype="bfloat16")
    assert "auto_map" not in plan.checkpoint.config
    assert any("--trust-remote-code" in warning for warning in plan.checkpoint.warnings)
