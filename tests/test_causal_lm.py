"""A configuration that does not describe a causal language model is refused in one line, whichever command reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from llmconv.causal_lm import require_sizes
from llmconv.cli import main
from llmconv.errors import MalformedInput, first_line

COMMANDS = ("export MODEL", "verify MODEL", "generate MODEL --prompt a", "generate MODEL --prompt a --backend torch")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_size_that_is_a_string_is_malformed(command: str, tmp_path: Path) -> None:
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": "96"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "prefill.onnx").write_bytes(b"")
    done = CliRunner().invoke(main, command.replace("MODEL", str(tmp_path)).split())
    assert done.exit_code == 3
    assert f"`config.json` of `{tmp_path}` has `vocab_size` '96', which is not a positive integer" in done.stderr
    assert done.stderr.count("\n") == 3 and "\n\nhint: " in done.stderr


@pytest.mark.parametrize(("name", "value"), [("hidden_size", 64.0), ("num_hidden_layers", 0), ("vocab_size", True)])
def test_sizes_that_are_no_positive_integers_are_malformed(name: str, value: Any) -> None:
    for config in ({name: value}, {"text_config": {name: value}}):
        with pytest.raises(MalformedInput, match=f"has `{name}` {value}, which is not"):
            require_sizes(config, "x")


@pytest.mark.parametrize("value", [None, 4, [4, 8]])
def test_a_size_may_be_missing_or_one_per_layer(value: Any) -> None:
    require_sizes({"num_attention_heads": value, "text_config": None}, "x")


def test_the_reason_after_a_colon_belongs_to_the_first_line() -> None:
    assert first_line(ValueError("field `a`:\n    not an integer\nmore")) == "field `a`: not an integer"
