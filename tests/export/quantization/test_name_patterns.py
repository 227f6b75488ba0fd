"""Patterns of `--quant-exclude` and `--quant-bits`: each matches a stored tensor, in bounded time."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from llmconv.cli import main
from llmconv.errors import UsageProblem
from llmconv.export.quantization.settings import matches, require_used
from llmconv.tensors import BY_NAME, in_memory

NAMES = ("model.embed_tokens.weight", "model.layers.0.self_attn.o_proj.weight", "model.layers.0.mlp.up_proj.weight")
TENSORS = {name: in_memory(np.zeros((2, 2), np.float32), BY_NAME["float32"]) for name in NAMES}


@pytest.mark.parametrize(("option", "value"), [("--quant-exclude", "o_prj"), ("--quant-bits", "o_prj=8")])
def test_a_pattern_that_matches_no_weight_is_refused_before_anything_is_written(
    llama: Path, tmp_path: Path, option: str, value: str
) -> None:
    words = ["export", str(llama), "-o", str(tmp_path / "out"), "--quant", "int4", option, value]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 2 and not (tmp_path / "out").exists()
    assert f"`{option} o_prj` matches no weight" in result.stderr and "hint: close names: `o_proj`" in result.stderr


def test_a_pattern_unlike_all_names_gets_examples() -> None:
    with pytest.raises(UsageProblem) as refused:
        require_used({"--quant-exclude": ["up_proj", "lm_head"]}, TENSORS)
    assert str(refused.value) == "`--quant-exclude lm_head` matches no weight"
    assert refused.value.hint == "names are such as " + ", ".join(f"`{name[:-7]}`" for name in NAMES)


def test_a_pattern_of_a_tensor_that_stays_anyway_is_accepted() -> None:
    require_used({"--quant-exclude": ["embed_tokens"], "--quant-bits": []}, TENSORS)


def test_a_pattern_that_backtracks_without_end_is_refused() -> None:
    began = time.process_time()
    with pytest.raises(UsageProblem, match=r"`--quant-exclude` has the regular expression '.*', which takes too long"):
        matches("--quant-exclude", "(.*|.*)+.*?" * 40 + "[^j]", "j" * 190)
    assert time.process_time() - began < 2


@pytest.mark.parametrize("pattern", [r"^(?!.*mlp).*layers", "(?i)O_PROJ", r"o_proj|up_p{1}roj", r"(_).*\1"])
def test_lookaround_flags_and_backreferences_are_supported(pattern: str) -> None:
    assert matches("--quant-exclude", pattern, NAMES[1])
