"""Shards as tasks of a Ray cluster: the bytes of one process, also when a node or the driver is killed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmconv import ray_connection
from llmconv.convert import to_hf
from llmconv.errors import OutputFailed, UnsupportedInput, UsageProblem
from llmconv.output import writer
from llmconv.output.work import Call, Ray
from tests.builders.hf_models import LLAMA, save_model
from tests.builders.ray_cluster import RayCluster, ray_cluster
from tests.stores.bucket import Bucket
from tests.stores.server import SECRET

SIZE = "8KB"
DEEP = LLAMA | {"num_hidden_layers": 12}
"""Some 60 shards of `SIZE`."""


@pytest.fixture(scope="module")
def cluster(bucket_server: Bucket) -> Iterator[RayCluster]:
    """Three nodes, which know the bucket."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (bucket_server.environment | {"PYTHONWARNINGS": "ignore"}).items():
            patch.setenv(name, value)
        with ray_cluster(3) as cluster:
            yield cluster


@pytest.fixture
def model(bucket: Bucket, tmp_path: Path) -> str:
    """A model in the bucket."""
    to_hf(save_model(tmp_path / "model", DEEP, {"tokenizer.json": b"{}"}), f"{bucket}/model", max_shard_size="1GB")
    return f"{bucket}/model"


def start(cluster: RayCluster, source: str | Path, out: str | Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "llmconv", "to-hf", str(source), "-o", str(out), "--max-shard-size", SIZE]
    environment = {**os.environ, "RAY_ADDRESS": cluster.address, "RAY_AUTH_MODE": "disabled"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([*command, "--engine", "ray", *options], text=True, env=environment, **pipes)  # type: ignore[call-overload, no-any-return]


def wait_for_shards(bucket: Bucket, count: int, process: subprocess.Popen[str]) -> int:
    """Waits until so many shards are in the journal; returns how many are."""
    while process.poll() is None:
        if (found := len(done(bucket))) >= count:
            return found
        time.sleep(0.01)
    raise AssertionError(process.communicate())


def done(bucket: Bucket) -> list[str]:
    return [name for name in bucket.files() if name.startswith(".llmconv/done/")]


def shards_put(bucket: Bucket) -> list[str]:
    prefix = f"PUT bucket/{bucket.prefix}/out/model-"
    return [request for request in bucket.requests() if request.startswith(prefix)]


@pytest.mark.slow
def test_a_node_that_is_killed_costs_only_its_task(cluster: RayCluster, model: str, bucket: Bucket) -> None:
    to_hf(model, f"{bucket}/alone", max_shard_size=SIZE)
    expected = bucket.files("alone")
    bucket.set_faults()
    with start(cluster, model, f"{bucket}/out") as process:
        wait_for_shards(bucket, 3, process)
        cluster.kill_node()
        stdout, stderr = process.communicate()
    assert process.returncode == 0, stderr
    assert bucket.files() == expected
    assert len(shards_put(bucket)) <= len([name for name in expected if name.startswith("model-")]) + 2
    assert SECRET not in stdout + stderr
    logs = [file for file in Path("/tmp/ray/session_latest/logs").rglob("*") if file.is_file()]
    assert logs and not [file for file in logs if SECRET.encode() in file.read_bytes()]


@pytest.mark.slow
def test_a_killed_driver_is_continued_by_resume(cluster: RayCluster, model: str, bucket: Bucket) -> None:
    to_hf(model, f"{bucket}/alone", max_shard_size=SIZE)
    expected = bucket.files("alone")
    with start(cluster, model, f"{bucket}/out") as process:
        wait_for_shards(bucket, 3, process)
        process.kill()
    time.sleep(3)  # Ray kills the tasks of a driver that is gone
    finished = len(done(bucket))
    assert "llmconv.json" not in bucket.files()
    bucket.set_faults()
    with start(cluster, model, f"{bucket}/out", "--resume") as process:
        _, stderr = process.communicate()
    assert process.returncode == 0, stderr
    assert bucket.files() == expected
    assert len(shards_put(bucket)) == len([name for name in expected if name.startswith("model-")]) - finished


@pytest.mark.slow
def test_a_source_that_is_refused_is_tried_once_and_leaves_nothing(
    cluster: RayCluster, model: str, bucket: Bucket
) -> None:
    damaged = Path(__file__).parents[2] / "examples/tiny-llama/ep4-ba2400-rank0.pt"
    content = bytearray(damaged.read_bytes())
    content[len(content) // 3] ^= 1
    (bucket.folder / bucket.prefix / "damaged.pt").write_bytes(content)
    with start(cluster, f"{bucket}/damaged.pt", f"{bucket}/out") as process:
        _, stderr = process.communicate()
    assert process.returncode == 3, stderr
    assert "is damaged" in stderr and "hint: " in stderr and "Traceback" not in stderr
    assert not bucket.files() and not bucket.uploads()


@pytest.mark.slow
def test_a_folder_that_only_the_driver_sees_is_named(cluster: RayCluster, tmp_path: Path, bucket: Bucket) -> None:
    model = save_model(tmp_path / "model", DEEP, {})
    bucket.set_faults(delay=0.05)  # or all shards may be done before the files are gone
    with start(cluster, model, f"{bucket}/out") as process:
        wait_for_shards(bucket, 1, process)
        for file in model.iterdir():
            file.rename(file.with_suffix(".gone"))
        _, stderr = process.communicate()
    assert process.returncode == 3 and "hint: " in stderr and "Traceback" not in stderr


@pytest.mark.slow
def test_a_connection_of_the_caller_is_used_and_kept(
    cluster: RayCluster, model: str, bucket: Bucket, tmp_path: Path
) -> None:
    code = f"""
import ray
from llmconv.convert import to_hf
from llmconv.output.work import Ray
ray.init(address="{cluster.address}", log_to_driver=False)
to_hf("{model}", "{bucket}/out", max_shard_size="{SIZE}", work=Ray())
assert ray.is_initialized()
"""
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    to_hf(model, tmp_path / "alone", max_shard_size=SIZE)
    assert bucket.files() == {path.name: path.read_bytes() for path in (tmp_path / "alone").iterdir()}


@pytest.mark.slow
def test_tasks_do_not_import_from_the_current_folder_of_the_driver(cluster: RayCluster, tmp_path: Path) -> None:
    code = """
import sys
from llmconv.ray_connection import connected
with connected("--engine ray") as ray:
    print(ray.get(ray.remote(num_cpus=0, resources={"llmconv_nic": 1})(lambda: sys.path).remote()))
"""
    environment = {**os.environ, "RAY_ADDRESS": cluster.address, "RAY_AUTH_MODE": "disabled"}
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "site-packages" in done.stdout and str(tmp_path) not in done.stdout


def test_a_node_with_another_version_refuses() -> None:
    answer = writer.write_shard({"version": "0.0.1", "folder": "/", "shard": "a", "function": ["a", "b"]})
    assert answer["error"] == "UnsupportedInput" and "not 0.0.1 as the driver" in answer["message"]


@pytest.mark.parametrize("uri", ["https://user:canary@host/model", "https://host/model?X-Signature=canary"])
def test_a_uri_with_a_credential_is_not_sent_to_a_cluster(uri: str) -> None:
    with pytest.raises(UsageProblem, match="credential") as refusal:
        writer.write_in_ray(Call(("a", "b"), {"adapters": ["a", uri]}), [], lambda count: None)
    assert "canary" not in str(refusal.value)


def test_a_cluster_that_does_not_answer_is_named_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    model = save_model(tmp_path / "model", LLAMA, {})
    with pytest.raises(OutputFailed, match="cannot be reached"):
        to_hf(model, tmp_path / "out", max_shard_size=SIZE, work=Ray())
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_without_ray_a_hint_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_connection, "find_spec", lambda name: None)
    model = save_model(tmp_path / "model", LLAMA, {})
    with pytest.raises(UnsupportedInput, match="not installed") as refusal:
        to_hf(model, tmp_path / "out", max_shard_size=SIZE, work=Ray())
    assert "pip install ray" in refusal.value.hint
