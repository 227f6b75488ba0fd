"""The model card: what the steps and the report say, with names that are anyone's as plain code."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from llmconv.convert import to_hf
from llmconv.output.hub_folder import model_card
from llmconv.output.manifest import Manifest
from tests.hub.conftest import Client

BASE = "org/base@" + "a" * 40
TUNED = "org/tuned@" + "b" * 40
CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
WHOLE: dict[str, dict[str, Any]] = {"config.json": {}, "model.safetensors": {}}


def step(command: str, source: str, **options: Any) -> dict[str, Any]:
    return {"command": command, "llmconv": "0.1.0", "source": source, "options": options}


def adapters(*names: str) -> list[dict[str, str]]:
    return [{"name": name, "sha256": "0" * 64} for name in names]


def header(*steps: dict[str, Any], files: dict[str, Any] = WHOLE, **graphs: Any) -> dict[str, Any]:
    text = model_card(Manifest([*steps], files, graphs), CONFIG, "me/model", None).decode()
    found: dict[str, Any] = yaml.safe_load(text.split("---\n")[1])
    return found


RELATIONS: dict[str, tuple[list[dict[str, Any]], str | None]] = {
    "a merged adapter": ([step("merge-lora", BASE, adapters=adapters("lora"))], "finetune"),
    "several adapters": ([step("merge-lora", BASE, adapters=adapters("one", "two"))], "merge"),
    "a delta": ([step("delta-apply", BASE, delta="delta")], "finetune"),
    "quantized graphs": ([step("merge-lora", BASE), step("export", "merged", quant="int4")], "quantized"),
    "graphs alone": ([step("export", BASE)], None),
    "another type": ([step("to-hf", BASE, dtype="bfloat16")], None),
    "trained from a base": ([step("to-hf", "ep1.pt", base=BASE)], "finetune"),
}


@pytest.mark.parametrize(("steps", "relation"), RELATIONS.values(), ids=RELATIONS)
def test_the_relation_to_the_base_is_one_that_the_hub_defines(
    steps: list[dict[str, Any]], relation: str | None
) -> None:
    found = header(*steps)
    assert found["base_model"] == "org/base" and found.get("base_model_relation") == relation
    assert found["library_name"] == "transformers" and found["pipeline_tag"] == "text-generation"


def test_an_adapter_is_one_of_peft() -> None:
    files: dict[str, Any] = {"adapter_config.json": {}, "adapter_model.safetensors": {}}
    found = header(step("delta-extract", BASE, rank=8), files=files)
    assert found["library_name"] == "peft" and found["base_model_relation"] == "adapter"


def test_a_base_that_is_not_on_the_hub_is_not_claimed() -> None:
    found = header(step("to-hf", "ep1.pt"), step("merge-lora", "base", adapters=adapters("lora")))
    assert "base_model" not in found and "base_model_relation" not in found


def test_graphs_have_their_tag() -> None:
    assert header(step("export", BASE), decode={"file": "decode.onnx"})["tags"] == ["llmconv", "onnx"]
    assert header(step("to-hf", BASE))["tags"] == ["llmconv"]


def test_hostile_names_are_code() -> None:
    hostile = "`<script>\n---\n# x: [y](z)`"
    steps = [step("to-hf", hostile, **{hostile: hostile}), {"command": None, "options": "no"}, {}]
    text = model_card(Manifest(steps, dict(WHOLE)), {}, "me/model", None).decode()
    assert text.count("---\n") == 2 and "\n# x" not in text
    assert all(line.count("`") % 2 == 0 for line in text.splitlines() if line[:1].isdigit())


REPORT = {"verdict": "pass", "checks": [{"verdict": "pass"}, {"verdict": "pass"}, {"verdict": "skip"}]}


def test_the_card_names_steps_verdict_and_how_to_run_it(client: Client, model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "mine"))
    (folder / "verified").mkdir()
    (folder / "verified/report.json").write_text(json.dumps(REPORT))
    (folder / "verified/summary.md").write_text("fine")
    assert client.run("push", folder, "me/tiny").returncode == 0
    found = client.hub.repositories["me/tiny"].contents()
    card = found["README.md"].decode()
    assert "1. `llmconv to-hf` of `ep4-ba2400-rank0.pt`" in card and "**PASS** (2 passed, 0 differ, 1 skipped)" in card
    assert "llmconv generate me/tiny" in card and 'from_pretrained("me/tiny")' in card
    assert "verified/report.json" in found


@pytest.mark.slow
def test_a_card_that_nobody_edited_is_replaced_with_the_model(client: Client, model: Path, tmp_path: Path) -> None:
    half = tmp_path / "half"
    to_hf(model, half, dtype="float16")
    assert client.run("push", model, "me/tiny").returncode == 0
    repository = client.hub.repositories["me/tiny"]
    assert client.run("push", half, "me/tiny").returncode == 0
    assert b"`dtype` `float16`" in repository.contents()["README.md"]
    edited = repository.contents()["README.md"].replace(b"# tiny", b"# Tiny, by hand")
    repository.put(README_md=edited)
    assert client.run("push", model, "me/tiny").returncode == 0
    assert repository.contents()["README.md"] == edited


@pytest.mark.slow
def test_a_report_from_before_the_last_change_is_not_told(client: Client, model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "mine"))
    (folder / "report.json").write_text(json.dumps(REPORT))
    os.utime(folder / "report.json", (1, 1))
    done = client.run("push", folder, "me/tiny")
    assert done.returncode == 0 and "older than `llmconv.json`" in done.stderr
    assert b"PASS" not in client.hub.repositories["me/tiny"].contents()["README.md"]


@pytest.mark.parametrize("content", [b"", b"[]", b'{"verdict": "**x**", "checks": []}', b'{"verdict": "pass"}'])
def test_a_report_that_is_none_says_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "report.json").write_bytes(content)
    text = model_card(Manifest([], dict(WHOLE)), CONFIG, "me/model", tmp_path / "report.json").decode()
    assert "Verification" not in text
