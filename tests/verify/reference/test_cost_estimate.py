"""What a verification needs of memory: said before it begins, and layer by layer where the whole does not fit."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from llmconv.checkpoint import open_weights
from llmconv.errors import InputRefused
from llmconv.verify import verify
from llmconv.verify.reference import cost_estimate
from llmconv.verify.reference.cost_estimate import CostEstimate, choose
from tests.conftest import save_tiny

Tiny = Callable[[str], Path]
BIG = CostEstimate(elements=10**9, whole=12 * 10**9, layered=2 * 10**9, mapped=10**9)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """`memory(gigabytes)` is what there is from now on."""

    def there_is(gigabytes: float) -> None:
        monkeypatch.setattr(
            cost_estimate, "available_memory", lambda mapped=False: None if mapped else int(gigabytes * 1e9)
        )

    return there_is


def test_a_model_that_fits_is_held_whole(memory: Callable[[float], None], capsys: pytest.CaptureFixture[str]) -> None:
    memory(16)
    assert choose(BIG, None) == (False, "")
    assert "about 12.0 of 16.0 GB of memory, about 8 minutes" in capsys.readouterr().err


def test_a_model_that_does_not_fit_runs_layer_by_layer(memory: Callable[[float], None]) -> None:
    memory(8)
    layered, note = choose(BIG, None)
    assert layered
    assert "takes about 12.0 GB of memory, and 8.0 GB are available" in note


@pytest.mark.parametrize(("gigabytes", "why_not"), [(1, ""), (8, "a graph begins with a prefix")])
def test_a_model_that_fits_in_neither_way_is_refused(
    memory: Callable[[float], None], gigabytes: float, why_not: str
) -> None:
    memory(gigabytes)
    with pytest.raises(InputRefused, match=r"needs about 12\.0 GB of memory") as caught:
        choose(BIG, None, why_not)
    assert (why_not or "layer by layer it takes about 2.0 GB") in caught.value.hint


@pytest.mark.parametrize("asked", [True, False])
def test_the_option_overrides_the_choice(asked: bool, memory: Callable[[float], None]) -> None:
    memory(1)
    assert choose(BIG, asked) == (asked, "")


def test_half_precision_counts_the_copies_of_onnxruntime(tmp_path: Path) -> None:
    import torch  # noqa: PLC0415
    from safetensors.torch import save_file  # noqa: PLC0415

    for name, dtype in (("full", torch.float32), ("half", torch.bfloat16)):
        (tmp_path / name).mkdir()
        tensors = {f"model.layers.{i}.w.weight": torch.zeros(1000, 1000, dtype=dtype) for i in range(2)}
        save_file(tensors, tmp_path / name / "model.safetensors")
    full, half = (CostEstimate.of(open_weights(tmp_path / name), 1) for name in ("full", "half"))
    assert half.whole - full.whole == 2 * 4 * full.elements
    assert full.layered < full.whole


@pytest.mark.slow
def test_a_model_that_does_not_fit_is_verified_layer_by_layer_with_a_note(
    exported: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cost_estimate, "SMALL", 0)
    monkeypatch.setattr(CostEstimate, "lacking", lambda self, size: 10**9 if size == self.whole else None)
    report = verify(exported("llama"), scenario=["prefill, 7 tokens", "rows exchanged"])
    assert report.verdict == "pass"
    assert any("layer by layer" in note for note in report.notes)
    assert any(check.name == "rows exchanged" and check.verdict == "skip" for check in report.checks)


LIMITED = """
import resource, sys
from pathlib import Path
from llmconv.verify.reference import cost_estimate
from llmconv.cli import main
import llmconv.verify.run, onnxruntime, torch
torch.set_num_threads(1)
used = int(dict(l.split(":", 1) for l in open("/proc/self/status") if ":" in l)["VmSize"].split()[0]) * 1024
resource.setrlimit(resource.RLIMIT_AS, (used + int(sys.argv[2]),) * 2)
cost_estimate.SMALL = 0
main(["verify", sys.argv[1], "--threads", "1", *sys.argv[3:]])
"""


def limited(folder: Path, room: int, *options: str) -> subprocess.CompletedProcess[str]:
    """`llmconv verify` in a process that can have so many more bytes of addresses."""
    return subprocess.run(
        [sys.executable, "-c", LIMITED, str(folder), str(room), *options], capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_too_little_memory_is_refused_before_anything_begins(exported: Tiny) -> None:
    done = limited(exported("llama"), 300 << 20)
    assert done.returncode == 3, done.stderr
    assert "verify needs about" in done.stderr
    assert "--no-low-memory" in done.stderr
    assert done.stdout == ""


@pytest.mark.slow
def test_memory_that_runs_out_is_reported_as_such(trained: Path) -> None:
    done = limited(trained, 200 << 20, "--no-low-memory")
    assert done.returncode == 4, done.stderr
    assert "memory ran out" in done.stderr
    assert "config.json" not in done.stderr


@pytest.mark.parametrize("gigabytes", [8, 64])
def test_quantized_graphs_say_what_they_take_and_are_refused_without_it(
    gigabytes: float, memory: Callable[[float], None], capsys: pytest.CaptureFixture[str]
) -> None:
    estimate = CostEstimate(134_515_008, 11 * 10**9, 11 * 10**9, 10**9, cost_estimate.SECONDS_QUANTIZED)
    memory(gigabytes)
    if gigabytes < 11:
        with pytest.raises(InputRefused, match=r"needs about 11\.0 GB of memory, and 8\.0 GB are available"):
            choose(estimate, None, "quantized graphs are compared whole")
    else:
        assert choose(estimate, None, "quantized graphs are compared whole") == (False, "")
        assert "about 11.0 of 64.0 GB of memory, about 9 minutes" in capsys.readouterr().err


def test_a_quantized_model_of_135_million_takes_what_was_measured(tmp_path: Path) -> None:
    estimate = CostEstimate.of_quantized(open_weights(save_tiny("llama", tmp_path)), 2)
    per_element = (estimate.whole - cost_estimate.BASE) / estimate.elements
    assert per_element * 134_515_008 == pytest.approx(10.8e9, rel=0.02)
