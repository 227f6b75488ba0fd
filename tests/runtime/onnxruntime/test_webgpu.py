"""Graphs on the kernels of onnxruntime's WebGPU provider, on the driver of this machine (Mesa's runs on a CPU)."""

from __future__ import annotations

import json
import os
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from benchmarks import environments
from tools.clients import no_adapter
from tools.tiny_models import depth, save_tiny

ROOT = Path(__file__).parents[3]
HOME = ROOT / environments.folder("webgpu")
pytestmark = pytest.mark.slow

FAMILIES = ["llama", "qwen3", "gemma3_text", "mixtral", "gpt2", "bloom", "phi3", "qwen3_5_text", "mamba2", "gpt_neox"]
FAMILIES += ["olmo2", "opt"]
FORMS: dict[str, dict[str, Any]] = {
    "float32": {"precision": "float32"},
    "float16": {"precision": "float16"},
    "int4": {"quant": "int4", "precision": "float16"},
}
ROUNDED = {("gpt2", "float16"), ("mamba2", "float16"), ("mamba2", "int4")}
"""What the provider's own rounding in float16 fails, by a little (docs/targets.md)."""
SCENARIOS = ("one-token prompt", "second turn", "left padding", "pasts of 30 to 1,022 tokens")

RUN = """
import json, site, sys
site.addsitedir(sys.argv[1])
from pathlib import Path
from llmconv.export import export
from llmconv.runtime import SessionSettings
from llmconv.verify import verify
from tools.gpu_checks import placed
model, out, options, scenarios = Path(sys.argv[2]), Path(sys.argv[3]), json.loads(sys.argv[4]), json.loads(sys.argv[5])
export(model, output=out, target="ort-webgpu", prefill=False, incremental=True, **options)
webgpu = SessionSettings(provider="webgpu")
report = verify(out, reference=model, settings=webgpu, method="whole", scenario=scenarios)
on_cpu = [name.rpartition(":")[2] for name in placed(out, "webgpu")["decode.onnx"]]
print(json.dumps({"lines": report.lines(), "verdict": report.verdict, "on cpu": on_cpu}))
"""


@pytest.fixture(scope="session")
def interpreter() -> Path:
    """The Python of the environment; skips without it, or without a driver."""
    if not (HOME / "complete").exists():
        pytest.skip("`make clients` makes the environment of WebGPU")
    if problem := no_adapter(HOME):
        pytest.skip(f"no adapter of WebGPU: {problem}")
    return HOME / "bin/python"


def run(interpreter: Path, code: str, *arguments: str) -> dict[str, Any]:
    """What a script prints in the environment of WebGPU, with the packages of this one behind its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_RUNTIME_DIR": os.environ.get("XDG_RUNTIME_DIR", "/tmp")}
    command = [str(interpreter), "-c", code, sysconfig.get_path("purelib"), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(
    ("model_type", "form"),
    [(name, form) for form in FORMS for name in FAMILIES if (name, form) not in ROUNDED],
)
def test_its_kernels_compute_what_the_eager_model_computes(
    interpreter: Path, model_type: str, form: str, tmp_path: Path
) -> None:
    save_tiny(model_type, tmp_path / "model", depth(model_type))
    found = run(
        interpreter, RUN, str(tmp_path / "model"), str(tmp_path / "out"), json.dumps(FORMS[form]), json.dumps(SCENARIOS)
    )
    assert found["verdict"] == "pass", found["lines"]
    assert not {"MatMul", "Gemm", "MatMulNBits", "Softmax"} & {*found["on cpu"]}
