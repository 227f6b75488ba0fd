"""Outputs in an object store: a reader sees all of one or nothing, and nothing is written or read twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import boto3
import pytest

from llmconv.addresses import parse_address
from llmconv.convert import to_hf
from llmconv.errors import InputRefused, LlmconvError, MalformedInput, OutputFailed
from llmconv.output.manifest import file_entry
from llmconv.output.store_folder import clean
from llmconv.output.work import Finish, Part
from llmconv.stores.object_store import ObjectStore
from llmconv.tensors import LazyTensor
from tests.builders.hf_models import LLAMA, save_model
from tests.builders.shard_outputs import F32, sample, write, written
from tests.stores.bucket import NAME, Bucket
from tests.stores.server import KEY, SECRET


def test_an_output_in_a_store_has_the_bytes_of_a_local_one(bucket: Bucket, tmp_path: Path) -> None:
    write(sample(), tmp_path / "out")
    write(sample(), f"{bucket}/out")
    assert bucket.files() == written(tmp_path / "out")


def test_the_claim_comes_first_and_the_manifest_last(bucket: Bucket) -> None:
    write(sample(), f"{bucket}/out")
    done = bucket.changes()
    assert done[0] == "PUT .llmconv/claim.json"
    names = [line.removeprefix("PUT ") for line in done if line.startswith("PUT ")]
    assert names[-4:] == ["tokenizer.json", "model.safetensors.index.json", "config.json", "llmconv.json"]
    assert {*done[done.index("PUT llmconv.json") + 1 :]} == {"POST bucket"}, "only deletes follow"


def test_resume_writes_only_what_is_missing_and_reads_nothing_again(bucket: Bucket, tmp_path: Path) -> None:
    with pytest.raises(OutputFailed):
        write(sample(OSError("lost")), f"{bucket}/out")
    assert set(bucket.files()) >= {"model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors"}
    bucket.set_faults()
    write(sample(), f"{bucket}/out", resume=True)
    shards = [line for line in bucket.requests() if line.endswith(".safetensors") and "HEAD" not in line]
    assert {line.rpartition("/")[2] for line in shards} == {"model-00003-of-00003.safetensors"}
    write(sample(), tmp_path / "out")
    assert bucket.files() == written(tmp_path / "out")


def test_resume_writes_a_shard_again_that_has_changed(bucket: Bucket, tmp_path: Path) -> None:
    with pytest.raises(OutputFailed):
        write(sample(OSError("lost")), f"{bucket}/out")
    size = len(bucket.files()["model-00001-of-00003.safetensors"])
    ObjectStore(parse_address(str(bucket))).write("out/model-00001-of-00003.safetensors", bytes(size), size)
    write(sample(), f"{bucket}/out", resume=True)
    write(sample(), tmp_path / "out")
    assert bucket.files() == written(tmp_path / "out")


def test_a_damaged_source_leaves_nothing(bucket: Bucket) -> None:
    with pytest.raises(MalformedInput):
        write(sample(MalformedInput("damaged", hint="none")), f"{bucket}/out")
    assert (bucket.files(), bucket.uploads()) == ({}, [])


def test_a_second_run_is_refused_until_the_first_is_resumed(bucket: Bucket) -> None:
    with pytest.raises(OutputFailed):
        write(sample(OSError("lost")), f"{bucket}/out")
    before = bucket.files()
    with pytest.raises(OutputFailed, match="another run is writing") as same:
        write(sample(), f"{bucket}/out")
    with pytest.raises(OutputFailed, match="another run is writing") as other:
        write(sample(extra=1), f"{bucket}/out", resume=True)
    assert "--resume" in same.value.hint and "llmconv clean" in other.value.hint
    assert bucket.files() == before


def test_a_complete_output_is_found_or_replaced_on_demand_only(bucket: Bucket, tmp_path: Path) -> None:
    write(sample(), f"{bucket}/out")
    with pytest.raises(InputRefused, match="already exists"):
        write(sample(), f"{bucket}/out")
    bucket.set_faults()
    write(sample(), f"{bucket}/out", resume=True)
    assert bucket.changes() == []
    write(sample(extra=1), f"{bucket}/out", overwrite=True)
    assert bucket.changes()[:2] == ["PUT .llmconv/claim.json", "PUT .llmconv/claim.json"]
    write(sample(extra=1), tmp_path / "out")
    assert bucket.files() == written(tmp_path / "out")


def test_objects_of_others_are_never_replaced(bucket: Bucket) -> None:
    place = bucket.folder / bucket.prefix / "out"
    place.mkdir(parents=True)
    (place / "notes.txt").write_bytes(b"mine")
    with pytest.raises(InputRefused, match="`notes.txt` and was not made by llmconv"):
        write(sample(), f"{bucket}/out", overwrite=True)
    assert bucket.files() == {"notes.txt": b"mine"}


@pytest.mark.slow
def test_of_many_runs_at_once_one_publishes(bucket: Bucket, tmp_path: Path) -> None:
    def run(number: int) -> str:
        try:
            write(sample(extra=number), f"{bucket}/out")
        except LlmconvError as error:
            return error.message
        return "wrote"

    with ThreadPoolExecutor(4) as pool:
        ended = list(pool.map(run, range(4)))
    assert ended.count("wrote") == 1, ended
    write(sample(extra=ended.index("wrote")), tmp_path / "out")
    assert bucket.files() == written(tmp_path / "out")


def test_a_store_without_conditions_is_named(bucket: Bucket, capsys: pytest.CaptureFixture[str]) -> None:
    bucket.set_faults(careless=True)
    write(sample(), f"{bucket}/out")
    assert "cannot refuse a second writer" in capsys.readouterr().err


def test_a_busy_store_gets_the_same_bytes(bucket: Bucket, tmp_path: Path) -> None:
    bucket.set_faults(busy=0.2, cut=0.3)
    write(sample(), f"{bucket}/out")
    write(sample(), tmp_path / "out")
    assert bucket.files() == written(tmp_path / "out")


@pytest.mark.parametrize(
    "edit",
    [{"sha256": 5}, {"sha256": "0" * 63}, {"link": "../secret"}, {"bytes": 160.0}],
    ids=["number", "short", "field", "float"],
)
def test_a_journal_entry_of_another_form_does_not_count(edit: dict[str, Any], bucket: Bucket, tmp_path: Path) -> None:
    write(sample(), f"{bucket}/out", work=Part(0, 1))
    journal = bucket.folder / bucket.prefix / "out/.llmconv/done/model-00001-of-00003.safetensors.json"
    line = json.loads(journal.read_bytes())
    line["entry"] |= edit
    _put(bucket, "out/.llmconv/done/model-00001-of-00003.safetensors.json", json.dumps(line).encode())
    with pytest.raises(OutputFailed, match=r"are missing \(1 of 3\)"):
        write(sample(), f"{bucket}/out", work=Finish())


def test_a_file_that_is_not_of_the_output_is_not_published_by_the_journal(bucket: Bucket) -> None:
    write(sample(), f"{bucket}/out", work=Part(0, 1))
    journal = bucket.folder / bucket.prefix / "out/.llmconv/done/model-00001-of-00003.safetensors.json"
    tag = _put(bucket, "out/mine.txt", b"mine")
    line = {**json.loads(journal.read_bytes()), "file": "mine.txt", "e_tag": tag, "entry": file_entry(b"mine")}
    _put(bucket, "out/.llmconv/done/mine.txt.json", json.dumps(line).encode())
    write(sample(), f"{bucket}/out", work=Finish())
    assert "mine.txt" not in json.loads(bucket.files()["llmconv.json"])["files"]


def _put(bucket: Bucket, name: str, content: bytes) -> str:
    return ObjectStore(parse_address(str(bucket))).write(name, content, len(content))


@pytest.mark.quick_rows("")
@pytest.mark.parametrize("place", ["out", "out/", "out/inside", ""])
def test_an_output_around_or_inside_its_input_is_refused_and_the_input_stays(
    place: str, bucket: Bucket, tmp_path: Path
) -> None:
    source, output = f"{bucket}/out", f"{bucket}/{place}".replace("s3://", "s3a://")
    to_hf(save_model(tmp_path / "model", LLAMA), source, dtype="bfloat16")
    before = bucket.files()
    with pytest.raises(InputRefused, match="contains the input|is inside the input"):
        to_hf(source, output, dtype="float16", overwrite=True)
    assert bucket.files() == before


def test_an_output_next_to_its_input_with_a_longer_name_is_made(bucket: Bucket, tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", LLAMA)
    to_hf(model, f"{bucket}/out", dtype="bfloat16")
    to_hf(f"{bucket}/out", f"{bucket}/out2", dtype="float16")
    assert "llmconv.json" in bucket.files("out2")


def test_clean_deletes_what_an_interrupted_run_left_and_nothing_else(bucket: Bucket) -> None:
    with pytest.raises(OutputFailed):
        write(sample(OSError("lost")), f"{bucket}/out")
    (bucket.folder / bucket.prefix / "out" / "notes.txt").write_bytes(b"mine")
    assert len(clean(f"{bucket}/out", dry_run=True).objects) == len(bucket.files()) - 1
    clean(f"{bucket}/out")
    assert bucket.files() == {"notes.txt": b"mine"}


def test_clean_leaves_a_published_output_alone(bucket: Bucket) -> None:
    write(sample(), f"{bucket}/out")
    before = bucket.files()
    assert clean(f"{bucket}/out").objects == ()
    assert bucket.files() == before


def test_revoked_credentials_in_the_middle_can_be_resumed(bucket: Bucket, tmp_path: Path) -> None:
    def revoke(start: int, stop: int) -> Any:
        bucket.set_faults(denied=["PUT", "POST", "DELETE"])
        return rows.read()[start:stop]

    checkpoint = sample()
    rows = checkpoint["t1"]
    revoking = replace(checkpoint, tensors={**checkpoint.tensors, "t1": LazyTensor(F32, (10, 2), revoke)})
    with pytest.raises(OutputFailed, match="denied"):
        write(revoking, f"{bucket}/out")
    bucket.set_faults()
    write(checkpoint, f"{bucket}/out", resume=True)
    write(checkpoint, tmp_path / "out")
    assert bucket.files() == written(tmp_path / "out")


def run(model: Path, bucket: Bucket, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "llmconv", "to-hf", str(model), "-o", f"{bucket}/out", "--max-shard-size", "8KB"]
    return subprocess.Popen(
        [*command, *options], env=os.environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


@pytest.mark.slow
@pytest.mark.parametrize("at", [1, 3, 4, 8])
def test_a_killed_run_is_completed_by_resume(at: int, bucket: Bucket, tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", LLAMA)
    bucket.set_faults(hold=at)
    with run(model, bucket) as process:
        bucket.wait_until_held(process)
        process.send_signal(signal.SIGKILL)
    assert "llmconv.json" not in bucket.files()
    bucket.set_faults()
    with run(model, bucket, "--resume") as process:
        stdout, stderr = process.communicate()
    assert process.returncode == 0, stderr
    local = [sys.executable, "-m", "llmconv", "to-hf", str(model), "-o", str(tmp_path / "out")]
    subprocess.run([*local, "--max-shard-size", "8KB"], check=True, capture_output=True)
    assert bucket.files() == written(tmp_path / "out")


@pytest.mark.slow
def test_clean_ends_the_upload_that_a_killed_run_left_open(bucket: Bucket, tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", LLAMA)
    bucket.set_faults(hold=4)
    with run(model, bucket) as process:
        bucket.wait_until_held(process)
        process.kill()
    bucket.set_faults()
    assert bucket.uploads()
    assert clean(f"{bucket}/out").uploads == 1
    assert (bucket.files(), bucket.uploads()) == ({}, [])


@pytest.mark.parametrize("place", ["", "out"])
def test_clean_leaves_the_uploads_of_other_outputs_and_programs_alone(place: str, bucket: Bucket) -> None:
    client = boto3.client("s3", endpoint_url=bucket.environment["AWS_ENDPOINT_URL"], region_name="us-east-1")
    key = f"{bucket.prefix}/out/theirs.bin"
    client.create_multipart_upload(Bucket=NAME, Key=key)
    client.close()
    assert clean(f"{bucket}/{place}").uploads == 0
    assert bucket.uploads() == [key]


@pytest.mark.slow
def test_no_credential_is_in_any_output_or_object(bucket: Bucket, tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", LLAMA)
    bucket.set_faults(busy=0.2)
    said = ""
    for options in (["-v"], ["--resume", "--json"], ["--overwrite", "-v"]):
        with run(model, bucket, *options) as process:
            said += "".join(process.communicate())
    said += "".join(content.decode(errors="replace") for content in bucket.files().values())
    assert SECRET not in said and KEY not in said
