"""Parts, workers, and what publishes their work: the same bytes as one process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llmconv.convert import from_hf, merge_lora, to_hf
from llmconv.errors import InputRefused, OutputFailed, UsageProblem
from llmconv.output.plan import Shard
from llmconv.output.work import Finish, Part, Workers
from llmconv.tensors import BY_NAME, LazyTensor
from tests.builders.hf_models import LLAMA, save_model
from tests.builders.lora_models import causal_lm, train
from tests.builders.shard_outputs import written
from tests.builders.to_hf_process import start_to_hf, workers_of
from tests.stores.bucket import Bucket

SIZE = "8KB"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_model(tmp_path / "model", LLAMA, {"tokenizer.json": b"{}"})


@pytest.fixture
def expected(model: Path, tmp_path: Path) -> dict[str, bytes]:
    """What one process writes."""
    to_hf(model, tmp_path / "alone", max_shard_size=SIZE)
    return written(tmp_path / "alone")


def partial(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.llmconv-partial")


@pytest.mark.slow
@given(sizes=st.lists(st.integers(0, 100), min_size=1, max_size=30), count=st.integers(1, 12))
def test_every_shard_is_in_exactly_one_part(sizes: list[int], count: int) -> None:
    dtype = BY_NAME["float32"]
    shards = [Shard(f"s{n}", {"t": LazyTensor(dtype, (size,), lambda a, b: None)}) for n, size in enumerate(sizes)]  # type: ignore[arg-type, return-value]
    chosen = [Part(number, count).chosen(shards) for number in range(count)]
    assert sorted(name for part in chosen for name in part) == sorted(shard.name for shard in shards)
    bytes_of = [sum(shard.nbytes for shard in shards if shard.name in part) for part in chosen]
    assert max(bytes_of) <= sum(bytes_of) / count + 4 * max(sizes)


@pytest.mark.parametrize("text", ["3", "1/0", "2/2", "-1/2", "a/b", "1/2/3", "1/99999"])
def test_a_part_that_does_not_exist_is_refused(text: str) -> None:
    with pytest.raises(UsageProblem):
        Part.parse(text)


def test_parts_in_any_order_and_a_finish_give_the_bytes_of_one_process(
    model: Path, expected: dict[str, bytes], tmp_path: Path
) -> None:
    for number in (2, 0, 1):
        to_hf(model, tmp_path / "out", max_shard_size=SIZE, work=Part(number, 3))
        assert not (tmp_path / "out").exists()
    to_hf(model, tmp_path / "out", max_shard_size=SIZE, work=Finish())
    assert written(tmp_path / "out") == expected
    assert not partial(tmp_path / "out").exists()


@pytest.mark.slow
def test_parts_meet_in_a_bucket(model: Path, expected: dict[str, bytes], bucket: Bucket) -> None:
    for number in (1, 0):
        to_hf(model, f"{bucket}/out", max_shard_size=SIZE, work=Part(number, 2))
        assert "llmconv.json" not in bucket.files()
    to_hf(model, f"{bucket}/out", max_shard_size=SIZE, work=Finish())
    assert bucket.files() == expected


@pytest.mark.quick_rows("local")
@pytest.mark.parametrize("kind", ["local", "bucket"])
def test_a_finish_names_what_is_missing_and_keeps_the_rest(
    kind: str, model: Path, expected: dict[str, bytes], bucket: Bucket, tmp_path: Path
) -> None:
    out = f"{bucket}/out" if kind == "bucket" else tmp_path / "out"
    to_hf(model, out, max_shard_size=SIZE, work=Part(0, 2))
    with pytest.raises(OutputFailed, match=r"are missing \(\d+ of 12\), such as `model-"):
        to_hf(model, out, max_shard_size=SIZE, work=Finish())
    to_hf(model, out, max_shard_size=SIZE, work=Part(1, 2))
    to_hf(model, out, max_shard_size=SIZE, work=Finish())
    assert (bucket.files() if kind == "bucket" else written(tmp_path / "out")) == expected


def test_a_damaged_shard_of_a_part_is_found_by_the_finish(
    model: Path, expected: dict[str, bytes], tmp_path: Path
) -> None:
    to_hf(model, tmp_path / "out", max_shard_size=SIZE, work=Part(0, 1))
    shard = partial(tmp_path / "out") / min(name for name in expected if name.endswith(".safetensors"))
    assert shard.name in expected
    shard.write_bytes(shard.read_bytes()[:-1] + b"\1")
    with pytest.raises(OutputFailed, match=r"missing \(1 of 12\), such as `model-00001"):
        to_hf(model, tmp_path / "out", max_shard_size=SIZE, work=Finish())


def test_a_part_of_another_plan_does_not_join(model: Path, tmp_path: Path) -> None:
    to_hf(model, tmp_path / "out", max_shard_size=SIZE, work=Part(0, 2))
    to_hf(model, tmp_path / "out", max_shard_size=SIZE, work=Part(1, 2), dtype="float16")
    with pytest.raises(OutputFailed, match="are missing"):
        to_hf(model, tmp_path / "out", max_shard_size=SIZE, work=Finish())


def test_a_part_cannot_replace_an_output(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageProblem, match="cannot replace"):
        to_hf(model, tmp_path / "out", overwrite=True, work=Part(0, 2))
    to_hf(model, tmp_path / "out", max_shard_size=SIZE)
    with pytest.raises(InputRefused, match="already exists"):
        to_hf(model, tmp_path / "out", max_shard_size=SIZE, work=Part(0, 2))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["local", "bucket"])
def test_workers_give_the_bytes_of_one_process(
    kind: str, model: Path, expected: dict[str, bytes], bucket: Bucket, tmp_path: Path
) -> None:
    out = f"{bucket}/out" if kind == "bucket" else tmp_path / "out"
    to_hf(model, out, max_shard_size=SIZE, work=Workers(2))
    assert (bucket.files() if kind == "bucket" else written(tmp_path / "out")) == expected
    to_hf(model, out, max_shard_size=SIZE, work=Workers(2), overwrite=True)
    assert (bucket.files() if kind == "bucket" else written(tmp_path / "out")) == expected


@pytest.mark.slow
def test_workers_import_nothing_from_the_current_folder(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "queue.py").write_text(f"open({str(tmp_path / 'was imported')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    command = [str(Path(sys.executable).with_name("llmconv")), "to-hf", str(model), "-o", "out", "--dtype", "float16"]
    done = subprocess.run([*command, "--workers", "1"], capture_output=True, text=True, check=False)
    assert (done.returncode, (tmp_path / "was imported").exists()) == (0, False), done.stderr


@pytest.mark.parametrize(
    ("kind", "numbers"), [(Part, (0.5, 2)), (Part, ("0", "2")), (Workers, (2.5,)), (Workers, (True,))]
)
def test_numbers_of_parts_and_workers_are_integers(kind: Callable[..., object], numbers: tuple[object, ...]) -> None:
    with pytest.raises(UsageProblem, match="not an integer"):
        kind(*numbers)


def test_a_part_as_text_is_refused_with_the_ways_to_give_work(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageProblem, match=r"not a `Part`, `Shards`, `Finish`, `Workers` or `Ray`"):
        to_hf(model, tmp_path / "out", work="0/2")  # type: ignore[arg-type]


def test_workers_do_not_repeat_warnings(model: Path, tmp_path: Path) -> None:
    line = [sys.executable, "-m", "llmconv", "from-hf", str(model), "-o", str(tmp_path / "out"), "--to", "meta"]
    done = subprocess.run([*line, "--shards", "2", "--workers", "2"], capture_output=True, text=True, check=False)
    warnings = [line for line in done.stderr.splitlines() if line.startswith("warning: ")]
    assert done.returncode == 0 and len(warnings) == len({*warnings}) > 0, done.stderr


@pytest.mark.slow
def test_a_damaged_source_ends_all_workers_and_leaves_nothing(model: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.pt"
    damaged.write_bytes((Path(__file__).parents[2] / "examples/tiny-llama/ep4-ba2400-rank0.pt").read_bytes())
    content = bytearray(damaged.read_bytes())
    content[len(content) // 3] ^= 1
    damaged.write_bytes(content)
    with pytest.raises(InputRefused, match="is damaged"):
        to_hf(damaged, tmp_path / "out", max_shard_size="50KB", work=Workers(2))
    assert not (tmp_path / "out").exists() and not partial(tmp_path / "out").exists()


@pytest.mark.slow
def test_a_worker_that_is_killed_costs_only_its_shard(model: Path, expected: dict[str, bytes], tmp_path: Path) -> None:
    with start_to_hf(model, tmp_path / "out", SIZE, "--workers", "2") as process:
        while not (workers := workers_of(process)) and process.poll() is None:
            time.sleep(0.01)
        os.kill(workers[0], signal.SIGKILL)
        _, stderr = process.communicate()
    assert process.returncode == 0, stderr
    assert written(tmp_path / "out") == expected


@pytest.mark.slow
def test_a_killed_run_with_workers_is_completed_by_resume(
    model: Path, expected: dict[str, bytes], tmp_path: Path
) -> None:
    with start_to_hf(model, tmp_path / "out", SIZE, "--workers", "2") as process:
        while not [*partial(tmp_path / "out").glob("journal-*")] and process.poll() is None:
            time.sleep(0.005)
        process.kill()
    time.sleep(1)  # its workers end when they find their input closed
    with start_to_hf(model, tmp_path / "out", SIZE, "--workers", "2", "--resume") as process:
        _, stderr = process.communicate()
    assert process.returncode == 0, stderr
    assert written(tmp_path / "out") == expected


def test_a_part_of_a_merge_cannot_be_checked(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageProblem, match="a part is not a model"):
        merge_lora(model, tmp_path / "adapter", tmp_path / "out", check=True, work=Part(0, 2))


@pytest.mark.quick_rows("options2")
@pytest.mark.parametrize("options", [("--workers", "0"), ("--workers", "-1"), ("--part", "3/3")])
def test_impossible_numbers_are_usage_errors(options: tuple[str, str], model: Path, tmp_path: Path) -> None:
    with start_to_hf(model, tmp_path / "out", SIZE, *options) as process:
        process.communicate()
    assert process.returncode == 2 and not (tmp_path / "out").exists()


@pytest.mark.slow
def test_part_finish_and_workers_exclude_each_other(model: Path, tmp_path: Path) -> None:
    with start_to_hf(model, tmp_path / "out", SIZE, "--workers", "2", "--finish") as process:
        _, stderr = process.communicate()
    assert process.returncode == 2 and "exclude each other" in stderr


@pytest.mark.slow
def test_workers_write_the_shards_of_a_training_checkpoint(model: Path, tmp_path: Path) -> None:
    from_hf(model, tmp_path / "alone", to="meta", shards=4)
    from_hf(model, tmp_path / "out", to="meta", shards=4, work=Workers(2))
    assert written(tmp_path / "out") == written(tmp_path / "alone")


@pytest.mark.parametrize("way", ["the file is moved", "the folder is moved", "a link", "a link above", "the name"])
def test_a_complete_output_is_not_that_of_an_older_model_in_the_place_of_its_source(way: str, tmp_path: Path) -> None:
    older, newer = (save_model(tmp_path / name / "model", LLAMA) for name in ("older", "newer"))
    weights = older / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    os.utime(weights, (1, 1))
    source = tmp_path / "current/model" if way == "a link above" else newer
    if way == "a link":
        source = tmp_path / "current"
        source.symlink_to(newer)
    elif way == "a link above":
        source.parent.symlink_to(newer.parent)
    to_hf(source, tmp_path / "out", dtype="float16")
    if way == "the name":
        source = older
    elif way == "the file is moved":
        weights.rename(newer / weights.name)
    elif way == "the folder is moved":
        newer.rename(tmp_path / "aside")
        older.rename(newer)
    else:
        link = source if way == "a link" else source.parent
        link.unlink()
        link.symlink_to(older if way == "a link" else older.parent)
    with pytest.raises(InputRefused, match="is complete, but it was made from another input"):
        to_hf(source, tmp_path / "out", dtype="float16", resume=True)


def test_parts_of_two_models_with_equal_names_sizes_and_times_are_not_mixed(tmp_path: Path) -> None:
    """As in two archives whose files all have one time."""
    one, other = (save_model(tmp_path / name / "model", LLAMA) for name in ("one", "other"))
    weights = other / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    for file in (*one.iterdir(), *other.iterdir()):
        os.utime(file, (10**9, 10**9))
    for number, model in enumerate((one, other)):
        to_hf(model, tmp_path / "out", max_shard_size=SIZE, work=Part(number, 2))
    with pytest.raises(OutputFailed, match="are missing"):
        to_hf(other, tmp_path / "out", max_shard_size=SIZE, work=Finish())


def test_a_complete_output_is_that_of_an_equal_source_of_any_age(tmp_path: Path) -> None:
    source = save_model(tmp_path / "model", LLAMA)
    to_hf(source, tmp_path / "out", dtype="float16")
    os.utime(source / "model.safetensors", (2**32, 2**32))
    assert to_hf(source, tmp_path / "out", dtype="float16", resume=True).found


@pytest.mark.slow
def test_a_worker_plans_once_for_all_its_shards(model: Path, expected: dict[str, bytes], bucket: Bucket) -> None:
    to_hf(model, f"{bucket}/model", max_shard_size="1GB")
    bucket.set_faults()
    to_hf(f"{bucket}/model", f"{bucket}/out", max_shard_size=SIZE, work=Workers(2))
    read = [request for request in bucket.requests() if request.endswith("/model/config.json")]
    assert len(expected) > 10 and len([request for request in read if request.startswith("GET")]) <= 3


@pytest.mark.slow
def test_a_warning_of_the_shards_is_printed_once(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from_hf(model, tmp_path / "meta", to="meta")
    file = tmp_path / "meta/consolidated.00.pth"
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(torch.load(file), file)
    finally:
        torch.serialization.set_crc32_options(True)
    to_hf(tmp_path / "meta", tmp_path / "out", max_shard_size=SIZE, work=Workers(2))
    assert capsys.readouterr().err.count("warning: `consolidated.00.pth` was saved without checksums") == 1


@pytest.mark.slow
def test_a_merge_in_workers_warns_once_and_is_checked_when_it_is_complete(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sizes: dict[str, Any] = {name: value for name, value in LLAMA.items() if isinstance(value, int)}
    case = train(causal_lm("llama", **sizes), tmp_path, merge=False, target_modules=["q_proj", "down_proj"])
    capfd.readouterr()
    adapters = [case.adapter, case.adapter]
    done = merge_lora(case.base, adapters, tmp_path / "out", max_shard_size=SIZE, check=True, work=Workers(2))
    assert done.check and len(done.plan.shards) > 4
    assert capfd.readouterr().err.count("is given twice") == 1
