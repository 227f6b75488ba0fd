"""What is converted from a bucket is byte for byte what is converted from the disk, in few requests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from llmconv.cli import main
from llmconv.convert import apply_delta, extract_delta, from_hf, inspect, merge_lora, to_hf
from llmconv.export import export
from llmconv.files.mirror import CHUNK
from tests.builders.hf_models import LLAMA, save_model
from tests.stores.reading_bucket import Bucket

EXAMPLE = Path(__file__).parents[3] / "examples/tiny-llama"
CHECKPOINT = EXAMPLE / "ep4-ba2400-rank0.pt"
FIXTURES = Path(__file__).parents[2] / "fixtures"
FORMATS = [
    "accessory/llama_mp2_bf16",
    "composer/llama_full",
    "composer/sharded_dcp/ep0-ba2",
    "dcp/fsdp_llama",
    "deepspeed/universal_z3",
    "deepspeed/z2_bf16_groups",
    "deepspeed/z3_bf16_subgroups",
    "litgpt/llama3",
    "meta/llama2_gqa_mp2_bf16",
    "mindformers/mf132_llama_gqa",
    "paddle/llama_sharded",
    "torch/gpt2_before_1_6",
]


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder of several shards; do not write into it."""
    folder = tmp_path_factory.mktemp("models") / "base"
    to_hf(CHECKPOINT, folder, max_shard_size="200KB")
    return folder


@pytest.fixture(scope="session")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 27 MB in one file, which is fetched in parts; do not write into it."""
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "vocab_size": 4096, "num_hidden_layers": 4}
    return save_model(tmp_path_factory.mktemp("models") / "large", LLAMA | sizes)


def put(bucket: Bucket, source: Path) -> str:
    """Uploads a file or a folder under a name of its own."""
    name = f"{source.parent.name}/{source.name}"
    return bucket.put(name, source.read_bytes()) if source.is_file() else bucket.put_folder(name, source)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_a_checkpoint_becomes_the_same_folder(bucket: Bucket, tmp_path: Path, name: str) -> None:
    to_hf(put(bucket, FIXTURES / name), tmp_path / "out")
    to_hf(FIXTURES / name, tmp_path / "local")
    assert contents(tmp_path / "out") == contents(tmp_path / "local")


def test_a_composer_file_takes_two_requests(bucket: Bucket, tmp_path: Path) -> None:
    to_hf(put(bucket, CHECKPOINT), tmp_path / "out")
    key = "tiny-llama/ep4-ba2400-rank0.pt"
    assert bucket.requests() == [("HEAD", key), ("GET", key)]  # less than 2 MiB: the data comes with the pickle


@pytest.mark.slow
def test_a_folder_of_shards_takes_a_request_for_each_file(bucket: Bucket, shards: Path, tmp_path: Path) -> None:
    uri = put(bucket, shards)
    from_hf(uri, tmp_path / "out", to="meta", shards=2)
    asked = Counter(bucket.requests())
    assert len(asked) == len([*shards.iterdir()]) + 1
    assert max(asked.values()) == 1
    from_hf(shards, tmp_path / "local", to="meta", shards=2)
    assert contents(tmp_path / "out") == contents(tmp_path / "local")


@pytest.mark.slow
def test_large_files_take_a_request_per_end_and_per_chunk(bucket: Bucket, large: Path, tmp_path: Path) -> None:
    from_hf(put(bucket, large), tmp_path / "out", to="meta", shards=2)
    size = (large / "model.safetensors").stat().st_size
    assert Counter(bucket.requests())["GET", f"{large.parent.name}/large/model.safetensors"] <= 1 + -(-size // CHUNK)
    from_hf(large, tmp_path / "local", to="meta", shards=2)
    assert contents(tmp_path / "out") == contents(tmp_path / "local")


def test_large_torch_files_take_a_request_per_end_and_per_chunk(bucket: Bucket, large: Path, tmp_path: Path) -> None:
    from_hf(large, tmp_path / "meta", to="meta", shards=2)
    to_hf(put(bucket, tmp_path / "meta"), tmp_path / "out")
    size = (tmp_path / "meta/consolidated.00.pth").stat().st_size
    asked = Counter(bucket.requests())
    assert asked["GET", f"{tmp_path.name}/meta/consolidated.00.pth"] <= 2 + -(-size // CHUNK)
    to_hf(tmp_path / "meta", tmp_path / "local")
    assert contents(tmp_path / "out") == contents(tmp_path / "local")


def test_a_torch_file_without_padding_is_read_even_if_a_storage_is_aligned_by_chance(
    bucket: Bucket, tmp_path: Path
) -> None:
    save_unpadded(tmp_path / "ep0.pt")
    to_hf(bucket.put("unpadded/ep0.pt", (tmp_path / "ep0.pt").read_bytes()), tmp_path / "out")
    to_hf(CHECKPOINT, tmp_path / "local")
    weights = "model.safetensors"
    assert (tmp_path / "out" / weights).read_bytes() == (tmp_path / "local" / weights).read_bytes()


def save_unpadded(path: Path) -> None:
    """The example as another program writes it; the fourth storage lies where torch would place it."""
    with zipfile.ZipFile(CHECKPOINT) as source, open(path, "wb") as file, zipfile.ZipFile(file, "w") as target:
        for name in source.namelist():
            info = zipfile.ZipInfo(name)
            start = file.tell() + 30 + len(name) + 4
            info.extra = (
                b"XX" + (-start % 64).to_bytes(2, "little") + bytes(-start % 64) if name.endswith("/3") else b""
            )
            target.writestr(info, source.read(name))


def test_inspect_of_a_large_file_fetches_no_data(bucket: Bucket, large: Path) -> None:
    assert inspect(put(bucket, large)).parameters == inspect(large).parameters
    assert Counter(bucket.requests())["GET", f"{large.parent.name}/large/model.safetensors"] == 1


@pytest.mark.slow
def test_a_merge_of_a_base_and_an_adapter(bucket: Bucket, shards: Path, tmp_path: Path) -> None:
    base, adapter = put(bucket, shards), put(bucket, EXAMPLE / "adapter")
    merge_lora(base, adapter, tmp_path / "out")
    merge_lora(shards, EXAMPLE / "adapter", tmp_path / "local")
    assert contents(tmp_path / "out") == contents(tmp_path / "local")


@pytest.mark.slow
def test_a_delta_of_two_models(bucket: Bucket, shards: Path, tmp_path: Path) -> None:
    merge_lora(shards, EXAMPLE / "adapter", tmp_path / "tuned")
    base, tuned = put(bucket, shards), put(bucket, tmp_path / "tuned")
    extract_delta(base, tuned, tmp_path / "delta")
    apply_delta(base, put(bucket, tmp_path / "delta"), tmp_path / "again")
    extract_delta(shards, tmp_path / "tuned", tmp_path / "local")
    assert contents(tmp_path / "delta") == contents(tmp_path / "local")
    assert (tmp_path / "again/config.json").read_bytes() == (tmp_path / "tuned/config.json").read_bytes()


@pytest.mark.slow
def test_inspect_fetches_headers_only(bucket: Bucket, shards: Path) -> None:
    found = inspect(put(bucket, shards))
    assert found.nbytes == inspect(shards).nbytes
    assert max(Counter(bucket.requests()).values()) == 1


@pytest.mark.slow
def test_faults_of_the_store_change_no_byte(faulty: Bucket, shards: Path, tmp_path: Path) -> None:
    merge_lora(put(faulty, shards), put(faulty, EXAMPLE / "adapter"), tmp_path / "out")
    merge_lora(shards, EXAMPLE / "adapter", tmp_path / "local")
    assert contents(tmp_path / "out") == contents(tmp_path / "local")


def test_a_source_that_changes_is_refused_with_exit_code_3(
    bucket: Bucket, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = put(bucket, CHECKPOINT)

    def changing(place: Path) -> Any:
        bucket.put("tiny-llama/ep4-ba2400-rank0.pt", CHECKPOINT.read_bytes()[::-1])
        return place

    monkeypatch.setattr(sys.modules["llmconv.convert.opening"], "unpacked", changing)
    result = CliRunner().invoke(main, ["to-hf", uri, "-o", str(tmp_path / "out")])
    assert result.exit_code == 3
    assert f"`{uri}` changed while it was read" in result.stderr
    assert not (tmp_path / "out").exists()


def test_an_interrupted_run_goes_on_if_the_object_is_the_same(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = put(bucket, CHECKPOINT)
    with monkeypatch.context() as patch:
        patch.setattr("llmconv.output.local_folder.StagedFolder.write_file", interrupted)
        with pytest.raises(KeyboardInterrupt):
            to_hf(uri, tmp_path / "out")
    monkeypatch.setattr("llmconv.output.local_folder.stream_shard", interrupted)  # no shard is written again
    to_hf(uri, tmp_path / "out", resume=True)
    assert (tmp_path / "out/llmconv.json").is_file()


def interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_terminated_run_leaves_nothing(bucket: Bucket, tmp_path: Path, temporary: Path, number: int) -> None:
    uri = put(bucket, CHECKPOINT)
    program = (
        "import signal, sys, time, llmconv.convert.to_hugging_face; from llmconv.cli import main\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it\n"
        "def waiting(*_, **__): print('waiting', flush=True); time.sleep(60)\n"
        "sys.modules['llmconv.convert.to_hugging_face'].plan_checkpoint = waiting\n"
        f"main(['to-hf', {uri!r}, '-o', {str(tmp_path / 'out')!r}])"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=dict(os.environ)) as process:
        assert process.stdout and process.stdout.readline()
        assert [*temporary.glob("llmconv-*")]
        process.send_signal(number)
        process.wait(30)


@pytest.mark.slow
def test_an_export_fetches_every_shard_once(bucket: Bucket, shards: Path, tmp_path: Path) -> None:
    export(put(bucket, shards), tmp_path / "out", unified=True)
    assert max(Counter(bucket.requests()).values()) == 1
    export(shards, tmp_path / "local", unified=True)
    assert contents(tmp_path / "out") == contents(tmp_path / "local")


@pytest.mark.slow
def test_an_export_of_graphs_only_fetches_headers(bucket: Bucket, large: Path, tmp_path: Path) -> None:
    export(put(bucket, large), tmp_path / "out", unified=True, graphs_only=True)
    assert Counter(bucket.requests())["GET", f"{large.parent.name}/large/model.safetensors"] == 1
    export(large, tmp_path / "local", unified=True, graphs_only=True)
    assert contents(tmp_path / "out") == contents(tmp_path / "local")


def test_messages_have_the_address_and_not_the_temporary_path(bucket: Bucket, shards: Path, tmp_path: Path) -> None:
    put_under = "unnamed/one"
    for path in shards.iterdir():
        if path.name.endswith((".json", "-00001-of-00004.safetensors")):
            bucket.put(f"{put_under}/{path.name}", path.read_bytes())
    runner = CliRunner()
    outer = runner.invoke(main, ["to-hf", bucket.uri("unnamed"), "-o", str(tmp_path / "out")])
    inner = runner.invoke(main, ["to-hf", bucket.uri(put_under), "-o", str(tmp_path / "out")])
    for result, uri in ((outer, bucket.uri("unnamed")), (inner, bucket.uri(put_under))):
        assert result.exit_code == 3 and uri in result.stderr, result.output
        assert "llmconv-fetched" not in result.stderr
