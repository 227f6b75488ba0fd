"""Stages in actors of a Ray cluster."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmconv.runtime.stages.connection import TOKEN
from tests.builders.ray_cluster import RayCluster, ray_cluster
from tests.runtime.stages.conftest import Staged

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    """Three nodes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONWARNINGS", "ignore")
        with ray_cluster(3) as cluster:
            yield cluster


def generate(folder: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "llmconv", "generate", str(folder), "--prompt", "ab cd", "--max-new-tokens", "12"]
    variables = {**os.environ, "RAY_AUTH_MODE": "disabled", **environment}
    return subprocess.run([*command, *options], capture_output=True, text=True, check=False, env=variables)


def test_stages_in_actors_give_the_text_of_one_process(cluster: RayCluster, staged: Staged) -> None:
    folder = staged("llama", 3)
    expected = generate(folder)
    found = generate(folder, "--stage-at", "ray", RAY_ADDRESS=cluster.address)
    assert found.returncode == 0, found.stderr
    assert found.stdout == expected.stdout and "Traceback" not in found.stderr
    assert TOKEN in found.stderr


def test_a_stage_that_no_node_can_open_ends_the_command(cluster: RayCluster, staged: Staged, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(staged("llama", 2), tmp_path / "model"))
    (folder / "decode-2-of-2.onnx").unlink()
    found = generate(folder, "--stage-at", "ray", RAY_ADDRESS=cluster.address)
    assert found.returncode == 3, found.stderr
    assert "on node " in found.stderr and "hint: " in found.stderr and "Traceback" not in found.stderr


def test_a_token_that_nodes_do_not_have_is_refused(cluster: RayCluster, staged: Staged) -> None:
    found = generate(staged("llama", 2), "--stage-at", "ray", RAY_ADDRESS=cluster.address, **{TOKEN: "secret"})
    assert found.returncode == 4 and "so anyone could use the stage" in found.stderr
    assert "Traceback" not in found.stderr and "secret" not in found.stderr
