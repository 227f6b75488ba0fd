"""The written folder: layout, bytes, and independence of the machine."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmconv import tensors as tensors_module
from llmconv.checkpoint import ADAPTER_CONFIG, ADAPTER_WEIGHTS, INDEX, Checkpoint, open_checkpoint
from llmconv.errors import InputRefused, OutputFailed, UsageProblem
from llmconv.output import plan as plan_module
from llmconv.output import writer
from llmconv.output.plan import Plan, parse_size, plan_checkpoint
from llmconv.output.writer import check_output, write_checkpoint
from llmconv.tensors import BY_NAME, LazyTensor, in_memory

F32 = BY_NAME["float32"]


def sample(sizes: tuple[int, ...] = (10, 3, 0, 7)) -> Checkpoint:
    """Tensors `t0`, `t1`, … of these rows and two columns."""
    tensors = {
        f"t{i}": in_memory(np.arange(rows * 2, dtype=np.float32).reshape(rows, 2) + i, F32)
        for i, rows in enumerate(sizes)
    }
    return Checkpoint(Path("sample"), "test", tensors, {"model_type": "llama"}, {"tokenizer.json": b"{}"})


def write(checkpoint: Checkpoint, folder: Path, max_shard_size: str | int = "5GB", **options: Any) -> dict[str, bytes]:
    """Writes it, and returns the content of every file."""
    write_checkpoint(plan_checkpoint(checkpoint, max_shard_size), folder, steps=[], sources=[], **options)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_one_file_needs_no_index(tmp_path: Path) -> None:
    files = write(sample(), tmp_path / "out")
    assert set(files) == {"model.safetensors", "config.json", "tokenizer.json", "llmconv.json"}


def test_the_manifest_has_size_and_sha256_of_every_other_file(tmp_path: Path) -> None:
    files = write(sample(), tmp_path / "out", 64)
    manifest = json.loads(files.pop("llmconv.json"))
    hashes = {name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in files.items()}
    assert manifest["files"] == hashes


def adapter() -> Checkpoint:
    """An adapter of one tensor."""
    tensor = in_memory(np.ones((2, 2), dtype=np.float32), F32)
    return Checkpoint(Path("sample"), "adapter", {"lora_A.weight": tensor}, {"r": 2})


def test_an_adapter_lies_in_a_sub_folder_and_not_in_the_index(tmp_path: Path) -> None:
    write_checkpoint(plan_checkpoint(replace(sample(), adapter=adapter()), 100), tmp_path / "out", steps=[], sources=[])
    assert {path.name for path in (tmp_path / "out" / "adapter").iterdir()} == {ADAPTER_CONFIG, ADAPTER_WEIGHTS}
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert index["metadata"]["total_size"] == sample().nbytes and set(index["weight_map"]) == set(sample())
    assert open_checkpoint(tmp_path / "out").keys() == sample().keys()


def test_an_adapter_alone_lies_in_the_folder_itself(tmp_path: Path) -> None:
    files = write(replace(sample(), tensors={}, adapter=adapter()), tmp_path / "out")
    assert set(files) == {ADAPTER_CONFIG, ADAPTER_WEIGHTS, "tokenizer.json", "llmconv.json"}


def test_shards_are_named_and_indexed_as_hugging_face_does(tmp_path: Path) -> None:
    files = write(sample(), tmp_path / "out", 100)
    index = json.loads(files[INDEX])
    assert index["metadata"] == {"total_size": 160}
    assert index["weight_map"] == {
        "t0": "model-00001-of-00002.safetensors",
        "t1": "model-00002-of-00002.safetensors",
        "t2": "model-00002-of-00002.safetensors",
        "t3": "model-00002-of-00002.safetensors",
    }


def test_a_tensor_larger_than_the_limit_gets_a_shard_of_its_own(tmp_path: Path) -> None:
    plan = plan_checkpoint(sample((1, 50, 1)), 20)
    assert [list(shard.tensors) for shard in plan.shards] == [["t0"], ["t1"], ["t2"]]


def test_the_library_reads_the_written_files(tmp_path: Path) -> None:
    write(sample(), tmp_path / "out")
    loaded = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(loaded["t1"], torch.arange(6.0).view(3, 2) + 1)
    assert loaded["t2"].shape == (0, 2)


@pytest.mark.slow
@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes=st.lists(st.integers(0, 9), min_size=1, max_size=6), limit=st.integers(1, 300), block=st.integers(1, 64))
def test_any_layout_reads_back_as_the_same_tensors(
    sizes: list[int], limit: int, block: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    checkpoint = sample(tuple(sizes))
    out = tmp_path_factory.mktemp("layout") / "out"
    with blocks_of(block):
        write(checkpoint, out, limit)
    found = open_checkpoint(out)
    assert list(found) == list(checkpoint)
    assert all(found[name].read().tobytes() == checkpoint[name].read().tobytes() for name in checkpoint)


@contextmanager
def blocks_of(size: int) -> Iterator[None]:
    """Streams in row blocks of at most `size` bytes."""
    usual = tensors_module.LazyTensor.blocks.__defaults__
    tensors_module.LazyTensor.blocks.__defaults__ = (size,)
    try:
        yield
    finally:
        tensors_module.LazyTensor.blocks.__defaults__ = usual


def test_the_bytes_do_not_depend_on_blocks_or_look_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = write(sample((100, 50)), tmp_path / "usual", 500)
    monkeypatch.setattr(plan_module, "LOOK_AHEAD", 1)
    monkeypatch.setattr(plan_module, "FLUSH_BYTES", 16)
    with blocks_of(24):
        assert write(sample((100, 50)), tmp_path / "other", 500) == usual


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_files_get_the_mode_of_the_umask(mask: int, mode: int, tmp_path: Path) -> None:
    before = os.umask(mask)
    try:
        write(sample(), tmp_path / "out")
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "out").iterdir()} == {mode}


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("500MB", 500 * 10**6), ("1.5kb", 1500), ("7", 7), (" 2 G ", 2 * 10**9)]
)
def test_sizes_are_decimal(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "GB", "-5GB", "5GiB", "five", "1e9"])
def test_an_invalid_size_is_refused(text: str) -> None:
    with pytest.raises(UsageProblem):
        parse_size(text)


def test_a_checkpoint_without_tensors_is_refused() -> None:
    with pytest.raises(InputRefused, match="contains no tensors"):
        plan_checkpoint(sample(()))


def test_an_error_in_a_tensor_leaves_nothing(tmp_path: Path) -> None:
    def fail(start: int, stop: int) -> Any:
        raise InputRefused("unreadable", hint="none")

    broken = {**sample().tensors, "broken": LazyTensor(F32, (4, 2), fail)}
    with pytest.raises(InputRefused, match="unreadable"):
        write(replace(sample(), tensors=broken), tmp_path / "out", 30)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("change", [lambda file: file.write_bytes(b"other"), Path.unlink], ids=["written", "deleted"])
def test_weights_that_change_while_they_are_read_are_not_published(
    change: Callable[[Path], object], tmp_path: Path
) -> None:
    source, checkpoint = tmp_path / "source.safetensors", sample()
    source.write_bytes(b"first")

    def changing(start: int, stop: int) -> Any:
        change(source)
        return rows.read()[start:stop]

    rows = checkpoint["t1"]
    plan = plan_checkpoint(
        replace(checkpoint, tensors={**checkpoint.tensors, "t1": LazyTensor(F32, rows.shape, changing)}), 64
    )
    with pytest.raises(InputRefused, match=r"`source.safetensors` changed while it was read"):
        write_checkpoint(plan, tmp_path / "out", steps=[], sources=[source])
    assert [path.name for path in tmp_path.iterdir() if path != source] == []


def test_a_log_in_the_folder_of_the_weights_may_grow(tmp_path: Path) -> None:
    sources = [tmp_path / "source.safetensors", tmp_path / "log.txt"]
    for source in sources:
        source.write_bytes(b"first")
    checkpoint = sample()

    def logging(start: int, stop: int) -> Any:
        sources[1].write_bytes(b"and more")
        return np.zeros((stop - start, 2), np.float32)

    tensors = {"t": LazyTensor(F32, (10, 2), logging)}
    plan = plan_checkpoint(replace(checkpoint, tensors=tensors), 64)
    write_checkpoint(plan, tmp_path / "out", steps=[], sources=sources)
    assert (tmp_path / "out/llmconv.json").is_file()


def test_a_disk_that_is_too_small_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    def read(start: int, stop: int) -> Any:
        raise AssertionError("read")

    vast = replace(sample(), tensors={"vast": LazyTensor(F32, (1 << 40, 1 << 10), read)})
    with pytest.raises(InputRefused, match="no space left"):
        check_output(plan_checkpoint(vast), tmp_path / "out", overwrite=False, inputs=[])
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_peak_of_memory_follows_the_block_and_not_the_tensor(
    tmp_path: Path, measure_peak: Callable[[Callable[[], object]], int]
) -> None:
    def rows(start: int, stop: int) -> Any:
        return np.zeros((stop - start, 1024), np.float32)

    large = replace(sample(), tensors={"large": LazyTensor(F32, (64 * 1024, 1024), rows)})
    assert (
        measure_peak(lambda: write_checkpoint(plan_checkpoint(large), tmp_path / "out", steps=[], sources=[]))
        < 100 << 20
    )


@pytest.fixture
def measure_peak() -> Callable[[Callable[[], object]], int]:
    """Runs a function in a forked child and returns by how many bytes its resident set grew at most."""
    import resource  # noqa: PLC0415

    def measure(work: Callable[[], object]) -> int:
        reader, out = os.pipe()
        if os.fork() == 0:
            try:
                before = resident()
                work()
                grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
                os.write(out, str(grown).encode())
            finally:
                os._exit(0)
        os.close(out)
        with os.fdopen(reader) as pipe:
            text = pipe.read()
        os.wait()
        return int(text)

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    return measure


def test_the_bytes_of_an_interrupted_run_count_as_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_checkpoint(sample((100, 50)), 10**9)
    usage = shutil.disk_usage(tmp_path)._replace(free=plan.nbytes - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(InputRefused, match="no space left"):
        writer.check_output(plan, tmp_path / "out", False, [])
    (tmp_path / ".out.llmconv-partial").mkdir()
    (tmp_path / ".out.llmconv-partial" / "model.safetensors").write_bytes(bytes(4096))
    writer.check_output(plan, tmp_path / "out", False, [])


@pytest.mark.parametrize("measured", ["same", "other"])
def test_resume_keeps_shards_of_the_same_measurements_only(measured: str, tmp_path: Path) -> None:
    """A text may say something else on another processor, and norms belong to the matrices of the same run."""
    read: list[str] = []

    def plan(run: str, failing: str = "") -> Plan:
        def loading(name: str) -> Callable[[int, int], Any]:
            def load(start: int, stop: int) -> Any:
                read.append(name)
                if name == failing:
                    raise OSError(errno.ENOSPC, "no space")
                return np.zeros((stop - start, 4), np.float32)

            return load

        made = sample()
        tensors = {name: LazyTensor(F32, (4, 4), loading(name)) for name in ("t0", "t1")}
        return replace(plan_checkpoint(replace(made, tensors=tensors), 64), measured=run)

    with pytest.raises(OutputFailed):
        write_checkpoint(plan("same", failing="t1"), tmp_path / "out", steps=[], sources=[])
    read.clear()
    write_checkpoint(plan(measured), tmp_path / "out", steps=[], sources=[], resume=True)
    assert set(read) == ({"t1"} if measured == "same" else {"t0", "t1"})
