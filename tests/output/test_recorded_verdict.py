"""The recorded verdict is not trusted: whatever is not of its form is refused, and nothing else is read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from llmconv.errors import MalformedInput
from llmconv.output.manifest import graph_sha256, parse_verdict, weight_file

HASH = "0123456789abcdef" * 4
ENTRY: dict[str, Any] = {
    "verdict": "pass",
    "method": "whole",
    "suite": "quick",
    "checks": {"passed": 4, "failed": 0, "skipped": 1},
    "unseen": ["graphs that are not the folder's own"],
    "reference": "org/name@abc",
    "versions": {"llmconv": "0.1.0"},
    "graphs": {"decode.onnx": HASH},
    "weights": {"model.safetensors": {"bytes": 9, "header_sha256": HASH, "sha256": HASH}},
}


def test_a_verdict_is_read_as_it_was_written() -> None:
    assert parse_verdict(ENTRY).as_dict() == ENTRY
    some = {**ENTRY, "only": ["batch of 3"]}
    assert parse_verdict(some).as_dict() == some


def test_keys_of_later_versions_are_ignored() -> None:
    assert parse_verdict({**ENTRY, "later": 1}) == parse_verdict(ENTRY)


@pytest.mark.parametrize(
    "change",
    [
        {"verdict": "PASS"},
        {"verdict": ["pass"]},
        {"method": ""},
        {"method": "whole\n"},
        {"method": "w" * 41},
        {"suite": None},
        {"only": "batch of 3"},
        {"only": [1]},
        {"checks": {}},
        {"checks": {"passed": True, "failed": 0, "skipped": 0}},
        {"checks": {"passed": -1, "failed": 0, "skipped": 0}},
        {"checks": {"passed": 10**400, "failed": 0, "skipped": 0}},
        {"checks": {"passed": 1.0, "failed": 0, "skipped": 0}},
        {"unseen": ["x" * 1001]},
        {"unseen": [""] * 10_001},
        {"reference": None},
        {"versions": {"llmconv": 1}},
        {"versions": []},
        {"graphs": {"decode.onnx": HASH.upper()}},
        {"graphs": {"../decode.onnx": HASH}},
        {"graphs": {"/etc/x.onnx": HASH}},
        {"graphs": {"config.json": HASH}},
        {"graphs": {"a\n.onnx": HASH}},
        {"weights": {"model.safetensors": HASH}},
        {"weights": {"a/b/model.safetensors": {"bytes": 9, "header_sha256": HASH}}},
        {"weights": {"model.safetensors": {"bytes": "9", "header_sha256": HASH}}},
        {"weights": {"model.safetensors": {"bytes": 9}}},
        {"weights": {"model.safetensors": {"bytes": 9, "header_sha256": HASH, "sha256": 5}}},
    ],
    ids=lambda change: str(change)[:60],
)
def test_a_malformed_verdict_is_refused_and_its_key_named(change: dict[str, Any]) -> None:
    with pytest.raises(MalformedInput, match=f"invalid `{next(iter(change))}` in the recorded verdict"):
        parse_verdict({**ENTRY, **change})


@pytest.mark.parametrize("content", [5, "pass", [], {}])
def test_something_else_is_refused(content: object) -> None:
    with pytest.raises(MalformedInput, match="in the recorded verdict"):
        parse_verdict(content)


def test_a_pipe_and_a_missing_file_are_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.onnx")
    assert graph_sha256(tmp_path / "pipe.onnx") == "" == graph_sha256(tmp_path / "missing.onnx")
    assert weight_file(tmp_path / "pipe.onnx") is None and weight_file(tmp_path / "missing.onnx") is None


@pytest.mark.parametrize("content", [b"", b"\x08", (9).to_bytes(8, "little") + b"{}", b"\xff" * 20])
def test_a_file_without_a_header_has_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    assert weight_file(tmp_path / "model.safetensors") is None
