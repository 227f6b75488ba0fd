"""A `genai_config.json` that contradicts its graph or its model does not pass, without the client itself."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest

from llmconv.errors import MalformedInput
from llmconv.export import export
from llmconv.export.clients.genai import special_tokens
from llmconv.verify import verify
from llmconv.verify.clients.client_files import field_checks
from llmconv.verify.results import Check

Change = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def exported(tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(tiny("llama"), tmp_path_factory.mktemp("genai_fields") / "llama", layout="genai").folder


def graphs(folder: Path) -> dict[str, onnx.ModelProto]:
    return {path.name: onnx.load(path, load_external_data=False) for path in folder.glob("*.onnx")}


def changed(folder: Path, change: Change) -> Check:
    """The check of a folder after a change of the configuration, which is undone."""
    path = folder / "genai_config.json"
    before = path.read_text()
    fields = json.loads(before)
    change(fields)
    path.write_text(json.dumps(fields))
    try:
        (found,) = field_checks(
            folder, {"model.onnx": onnx.load(folder / "model.onnx", load_external_data=False)}, folder
        )
    finally:
        path.write_text(before)
    return found


WRONG: dict[str, Change] = {
    "layers": lambda c: c["model"]["decoder"].update(num_hidden_layers=1),
    "heads": lambda c: c["model"]["decoder"].update(num_key_value_heads=64),
    "head size": lambda c: c["model"]["decoder"].update(head_size=3),
    "no head size": lambda c: c["model"]["decoder"].pop("head_size"),
    "another graph": lambda c: c["model"]["decoder"].update(filename="other.onnx"),
    "names of the cache": lambda c: c["model"]["decoder"]["inputs"].update(past_key_names="past.%d.key"),
    "keys as values": lambda c: c["model"]["decoder"]["outputs"].update(
        present_key_names="present.%d.value", present_value_names="present.%d.key"
    ),
    "name of an input": lambda c: c["model"]["decoder"]["inputs"].update(attention_mask="mask"),
    "name of the logits": lambda c: c["model"]["decoder"]["outputs"].update(logits="scores"),
    "vocabulary": lambda c: c["model"].update(vocab_size=10),
    "context": lambda c: c["model"].update(context_length=1_000_000),
    "end tokens": lambda c: c["model"].update(eos_token_id=[5]),
    "no end tokens": lambda c: c["model"].pop("eos_token_id"),
    "length": lambda c: c["search"].update(max_length=1_000_000),
    "a buffer for a growing cache": lambda c: c["search"].update(past_present_share_buffer=True),
    "a library": lambda c: c["model"]["decoder"]["session_options"].update(custom_ops_library="evil.so"),
    "no decoder": lambda c: c["model"].pop("decoder"),
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG)
def test_a_field_that_contradicts_the_graph_or_the_model_fails(exported: Path, change: Change) -> None:
    assert changed(exported, change).verdict == "fail"


def _chosen(fields: dict[str, Any]) -> None:
    """Settings that are the user's."""
    fields["search"].update(do_sample=True, temperature=0.7, max_length=8)
    fields["model"]["context_length"] = 16
    fields["model"]["decoder"]["session_options"]["intra_op_num_threads"] = 2


@pytest.mark.parametrize("change", [_chosen, lambda c: None], ids=["chosen", "as exported"])
def test_settings_that_a_user_may_choose_pass(exported: Path, change: Change) -> None:
    found = changed(exported, change)
    assert (found.verdict, found.detail) == ("pass", "as the graphs and the model")


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"prefill": True, "incremental": True}, id="pair"),
        pytest.param({"cache": "shared-buffer"}, id="shared buffer", marks=pytest.mark.slow),
    ],
)
def test_what_export_writes_passes(tiny: Callable[[str], Path], tmp_path: Path, options: dict[str, Any]) -> None:
    folder = export(tiny("llama"), tmp_path / "out", layout="genai", **options).folder
    (found,) = field_checks(folder, graphs(folder), folder)
    assert found.verdict == "pass", found.detail


@pytest.mark.parametrize("value", ["x", [1.5], True])
def test_export_refuses_a_token_that_is_no_number(value: Any) -> None:
    with pytest.raises(MalformedInput, match="`eos_token_id` is .*, which is not a token id"):
        special_tokens({"eos_token_id": value}, 8)


@pytest.mark.slow
def test_verify_fails_without_the_client(exported: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(exported, tmp_path / "model")
    fields = json.loads((folder / "genai_config.json").read_text())
    fields["model"]["decoder"]["head_size"] *= 2
    (folder / "genai_config.json").write_text(json.dumps(fields))
    report = verify(folder, scenario="one-token prompt", record=False)
    assert [check.name for check in report.checks if check.verdict == "fail"] == ["client fields"]
