"""`--calibrate`: the importance of columns is the mean square of what they are multiplied with."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from llmconv.checkpoint import open_checkpoint
from llmconv.errors import InputRefused, UsageProblem
from llmconv.export import export
from llmconv.export.folders import file_tensors
from llmconv.export.graph_spec import GROWING
from llmconv.export.language_model import open_language_model
from llmconv.export.quantization.calibration import TextRun, column_importance
from llmconv.sample_texts import DEFAULT, calibration_text
from llmconv.tensors import Array
from llmconv.verify import verify
from tests.conftest import save_tiny

IDS = [np.random.default_rng(seed).integers(3, 90, (1, 40)) for seed in (0, 1)]


def importance(folder: Path) -> dict[str, Array]:
    checkpoint = open_checkpoint(folder)
    tensors = file_tensors(checkpoint)
    traced = open_language_model(checkpoint).trace({"unified": GROWING})[0]["unified"]
    return column_importance(TextRun(traced, IDS, tensors))


def observed(folder: Path) -> dict[str, Array]:
    """Mean squares of the inputs of every linear layer, from hooks of torch, scaled to a mean of 1."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    sums: dict[str, torch.Tensor] = {}

    def hook(name: str) -> Callable[..., None]:
        def see(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            values = inputs[0].double().reshape(-1, inputs[0].shape[-1])
            sums[name] = sums.get(name, torch.zeros(values.shape[1])) + (values**2).sum(0)

        return see

    for name, module in model.named_modules():
        if (
            hasattr(module, "weight")
            and module.weight.dim() == 2
            and "emb" not in name
            and name[-3:] not in ("wte", "wpe")
        ):
            module.register_forward_pre_hook(hook(f"{name}.weight"))
    with torch.no_grad():
        for ids in IDS:
            model(torch.from_numpy(ids))
    return {name: (total / total.mean()).numpy() for name, total in sums.items()}


@pytest.mark.one_row_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_importance_is_what_hooks_of_torch_see(model_type: str, tmp_path: Path) -> None:
    folder = save_tiny(model_type, tmp_path / model_type)
    found, expected = importance(folder), observed(folder)
    compared = {name: tensor for name, tensor in expected.items() if name in found}
    assert len(compared) >= len(expected) - 1  # a tied head has the name of the embedding
    for name, squares in compared.items():
        assert np.allclose(found[name], squares, rtol=1e-4), name


@pytest.mark.slow
def test_every_expert_has_its_own(tmp_path: Path) -> None:
    found = importance(save_tiny("mixtral", tmp_path / "moe", **SMALL_EXPERTS))
    experts = [squares for name, squares in found.items() if ".experts.0." in name or name.endswith("gate_up_proj")]
    assert experts and all(np.isfinite(squares).all() for squares in experts)


SMALL_EXPERTS = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
}


@pytest.fixture(scope="module")
def prose(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "prose.txt"
    path.write_text("Once there was a clever robot named Bolt. Bolt sailed an iron ship over the cold sea. " * 40)
    return path


@pytest.mark.slow
def test_a_calibrated_folder_verifies_and_has_other_codes(talking: Path, prose: Path, tmp_path: Path) -> None:
    for name, text in (("plain", None), ("calibrated", prose)):
        export(talking, tmp_path / name, quant="int4", calibrate=text, incremental=True)
    plain, other = (load_file(tmp_path / name / "quantized.safetensors") for name in ("plain", "calibrated"))
    name = "model.layers.0.mlp.down_proj.weight.codes"
    assert plain.keys() == other.keys() and not np.array_equal(plain[name], other[name])
    assert verify(tmp_path / "calibrated", reference=talking).verdict == "pass"


@pytest.mark.slow
def test_a_short_text_is_refused(talking: Path, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("ab")
    with pytest.raises(InputRefused, match="too short to measure anything"):
        export(talking, tmp_path / "out", quant="int4", calibrate=tmp_path / "short.txt")
    assert not (tmp_path / "out").exists()


def test_a_file_that_is_no_text_is_refused(talking: Path, tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputRefused, match="is not UTF-8 text"):
        export(talking, tmp_path / "out", quant="int4", calibrate=tmp_path / "binary")


def test_a_missing_file_is_refused(talking: Path, tmp_path: Path) -> None:
    with pytest.raises(InputRefused, match="cannot read"):
        export(talking, tmp_path / "out", quant="int4", calibrate=tmp_path / "none.txt")


def test_rounding_to_nearest_takes_no_text(talking: Path, prose: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageProblem, match="guides the search"):
        export(talking, tmp_path / "out", quant="int4", method="rtn", calibrate=prose)


@pytest.mark.slow
def test_the_word_default_is_the_text_that_ships_with_llmconv(talking: Path, tmp_path: Path) -> None:
    (tmp_path / "same.txt").write_text(calibration_text())
    export(talking, tmp_path / "word", quant="int4", calibrate=DEFAULT, incremental=True)
    export(talking, tmp_path / "file", quant="int4", calibrate=tmp_path / "same.txt", incremental=True)
    words, files = (json.loads((tmp_path / name / "llmconv.json").read_text()) for name in ("word", "file"))
    assert words["files"] == files["files"]
    assert words["steps"][-1]["options"]["calibrate"] == files["steps"][-1]["options"]["calibrate"]


def test_a_file_of_this_name_is_not_shadowed(talking: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path(DEFAULT).write_text("ab")
    with pytest.raises(UsageProblem, match="and of a file here"):
        export(talking, tmp_path / "out", quant="int4", calibrate=DEFAULT)
    for name in (f"./{DEFAULT}", Path(DEFAULT)):
        with pytest.raises(InputRefused, match="`default` is too short to measure anything: 2 tokens"):
            export(talking, tmp_path / "out", quant="int4", calibrate=name)
