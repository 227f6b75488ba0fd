"""Make the client environments for the slow tests; existing ones are kept."""

from __future__ import annotations

import os
import subprocess
import sysconfig
from pathlib import Path

from benchmarks import environments

ONE_NODE = """
import site, sys
site.addsitedir(sys.argv[1])
import onnxruntime
from onnx import TensorProto, helper
value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4]) for name in "xy"]
graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "one node", value[:1], value[1:])
model = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 21)])
session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["WebGpuExecutionProvider"])
sys.exit("WebGpu" not in session.get_providers()[0])  # it goes on without the provider
"""


def no_adapter(home: Path) -> str:
    """Why onnxruntime's WebGPU provider does not start in the environment `home`; empty if it does."""
    environment = {"XDG_RUNTIME_DIR": "/tmp", **os.environ}
    command = [str(home / "bin/python"), "-c", ONE_NODE, sysconfig.get_path("purelib")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith("    at ")]
    return (lines or ["the provider does not start"])[-1].strip() if done.returncode else ""


def main() -> None:
    """Makes all environments in `build/`."""
    for make, name in (
        (environments.python, "genai"),
        (environments.python, "optimum"),
        (environments.python, "embedders"),
        (environments.python, "lm-eval"),
        (environments.python, "openvino"),
        (environments.node, "transformersjs"),
        (environments.node, "azurite"),
        (environments.node, "chromium"),
        (environments.python, "chromedriver"),
        (environments.python, "smollm2"),
        (environments.python, "webgpu"),
        (environments.python, "vllm"),
        *((environments.python, name) for name in environments.OF_SERVE),
        (environments.node, "ai-sdk"),
    ):
        print(f"{name}: {make(name)}")
    if problem := no_adapter(environments.folder("webgpu")):
        print(f"webgpu: no adapter, so its tests are skipped ({problem})")
        print("  without a GPU, Mesa 25 runs it on the CPU; Debian 12 has it in bookworm-backports:")
        print("  apt-get install -t bookworm-backports mesa-vulkan-drivers libvulkan1")


if __name__ == "__main__":
    main()
