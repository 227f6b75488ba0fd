"""Models of the hub as inputs: `hf://org/name[@revision][/folder]`, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import transformers

from llmconv.addresses import HubAddress, parse_hub_address
from llmconv.convert import to_hf
from llmconv.errors import InputRefused
from llmconv.export import export
from llmconv.files.sources import export_command, model_name, source_name
from tests.builders.fake_hub import Fault, Repository, Stored
from tests.hub.conftest import CHECKPOINT, Client, contents

ADDRESSES = {
    "hf://org/name": HubAddress("org/name"),
    "hf://models/org/name": HubAddress("org/name"),
    "hf://gpt2": HubAddress("gpt2"),
    "hf://org/name/": HubAddress("org/name"),
    "hf://org/name@v1.0": HubAddress("org/name", "v1.0"),
    "hf://org/name@v1.0/onnx/int4": HubAddress("org/name", "v1.0", "onnx/int4"),
    "hf://org/name/onnx": HubAddress("org/name", "", "onnx"),
    "hf://org/name@refs/pr/3/onnx": HubAddress("org/name", "refs/pr/3", "onnx"),
    "hf://org/name@feature%2Fx/onnx": HubAddress("org/name", "feature/x", "onnx"),
}


def upload(repository: Repository, folder: Path, place: str = "", branch: str = "main") -> None:
    """Commits a folder."""
    files = {place + name: Stored(data, name.endswith(".safetensors")) for name, data in contents(folder).items()}
    repository.add(branch, {**repository.files(), **files})


@pytest.mark.parametrize(("text", "address"), ADDRESSES.items(), ids=ADDRESSES)
def test_the_parts_of_an_address(text: str, address: HubAddress) -> None:
    assert parse_hub_address(text) == address


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hf://datasets/org/name", "is a dataset of the Hugging Face Hub"),
        ("hf://spaces/org/name/app.py", "is a space"),
        ("hf://buckets/org/name", "is a bucket"),
        ("hf://", "is not the address of a model"),
        ("hf://org/name@", "is not the address of a model"),
        ("hf://org/name/../../etc", "is not the address of a model"),
        ("hf://org/name@a b", "is not the address of a model"),
        ("hf://-org/name", "is not the address of a model"),
    ],
)
def test_other_addresses_are_refused(text: str, message: str) -> None:
    with pytest.raises(InputRefused, match=message):
        parse_hub_address(text)


@pytest.mark.slow
def test_a_revision_and_a_folder_of_it_alone_are_downloaded(client: Client, model: Path, tmp_path: Path) -> None:
    repository = client.hub.repository("org/name", private=True)
    upload(repository, model, "inner/", "v1")
    repository.put("v1", other_safetensors=b"unwanted")
    done = client.run("to-hf", "hf://org/name@v1/inner", "-o", tmp_path / "out", "--dtype", "bfloat16")
    assert done.returncode == 0, done.stderr
    fetched = {request for request in client.hub.requests if request.startswith("GET /org/name/resolve")}
    assert len(fetched) == len(contents(model)) and all("/inner/" in request for request in fetched)
    again = client.run("inspect", "hf://org/name@v1/inner")
    assert again.returncode == 0 and len(client.hub.requests) > len(fetched)
    client.environment["HF_HUB_OFFLINE"] = "1"
    assert client.run("inspect", "hf://org/name@v1/inner").returncode == 0
    missing = client.run("inspect", "hf://org/name@v2/inner")
    assert missing.returncode == 3 and "HF_HUB_OFFLINE is set" in missing.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["org/name", "hf://org/name/inner"])
def test_inspect_reads_the_headers_of_weights_alone(client: Client, tmp_path: Path, name: str) -> None:
    """Each shard has 4 MB of zeros, and what is shown is that of the same folder on the disk."""
    folder, place = tmp_path / "model", "inner/" if "inner" in name else ""
    save_large(folder)
    repository = client.hub.repository("org/name", private=True)
    upload(repository, folder, place)
    here, there = (client.run("inspect", path, "--json") for path in (folder, name))
    assert there.returncode == 0, there.stderr
    shown = [{**json.loads(done.stdout), "path": ""} for done in (here, there)]
    assert shown[0] == shown[1] and json.loads(there.stdout)["path"] == name
    size = sum(len(data) for data in contents(folder).values())
    assert size > 8_000_000 and client.hub.sent < 1_000_000
    assert not any(path.suffix == ".safetensors" for path in client.home.rglob("*"))
    offline = client.run("inspect", name)
    client.environment["HF_HUB_OFFLINE"] = "1"
    assert offline.returncode == 0 and client.run("inspect", name).returncode == 3


@pytest.mark.slow
def test_inspect_uses_the_cache_where_it_has_all_files(client: Client, model: Path, tmp_path: Path) -> None:
    upload(client.hub.repository("org/name"), model)
    assert client.run("to-hf", "org/name", "-o", tmp_path / "out", "--dtype", "bfloat16").returncode == 0
    before = client.hub.sent
    done = client.run("inspect", "org/name", "--json")
    assert done.returncode == 0 and client.hub.sent == before
    assert "snapshots" in json.loads(done.stdout)["path"]


@pytest.mark.quick_rows("403")
@pytest.mark.parametrize("status", [403, 404])
def test_a_file_that_the_hub_refuses_is_one_line(client: Client, tmp_path: Path, status: int) -> None:
    save_large(tmp_path / "model")
    upload(client.hub.repository("org/name"), tmp_path / "model")
    client.hub.faults = [Fault("model-00002", status, times=99)]
    done = client.run("inspect", "org/name")
    assert done.returncode == 3 and done.stderr.startswith("error: `org/name`") and "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_file_that_changed_on_the_way_is_refused_and_downloaded_again(
    client: Client, model: Path, tmp_path: Path
) -> None:
    """huggingface_hub compares sizes only; the hub's sha256 is the name of the file in the cache."""
    upload(client.hub.repository("org/name"), model)
    client.hub.damaged = "model-00001"
    done = client.run("to-hf", "org/name", "-o", tmp_path / "out", "--dtype", "bfloat16")
    assert done.returncode == 3 and "arrived damaged from the hub" in done.stderr, done.stderr
    client.hub.damaged = ""
    assert client.run("to-hf", "org/name", "-o", tmp_path / "out", "--dtype", "bfloat16").returncode == 0


def save_large(folder: Path) -> None:
    """A model in two shards of 4 MB each."""
    config = transformers.LlamaConfig(
        vocab_size=8192, hidden_size=128, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="4MB")


def test_a_model_of_a_folder_is_converted_and_its_step_names_repository_and_commit(
    client: Client, model: Path, tmp_path: Path
) -> None:
    repository = client.hub.repository("org/name")
    upload(repository, model, "inner/")
    done = client.run("to-hf", "hf://org/name/inner", "-o", tmp_path / "out", "--dtype", "bfloat16")
    assert done.returncode == 0, done.stderr
    steps = json.loads((tmp_path / "out/llmconv.json").read_text())["steps"]
    assert steps[-1]["source"] == f"org/name@{repository.branches['main']}/inner"


@pytest.mark.slow
def test_a_missing_folder_and_a_missing_revision_are_named(client: Client, model: Path) -> None:
    upload(client.hub.repository("org/name"), model)
    done = client.run("inspect", "hf://org/name/nothing")
    assert done.returncode == 3 and "has no folder or file `nothing`" in done.stderr
    done = client.run("inspect", "hf://org/name@v9")
    assert done.returncode == 3 and "has no revision `v9`" in done.stderr


@pytest.mark.slow
def test_a_gated_model_is_refused(client: Client) -> None:
    client.hub.repository("org/name").gated = True
    done = client.run("inspect", "hf://org/name")
    assert done.returncode == 3 and "gated" in done.stderr


@pytest.mark.slow
def test_a_dataset_is_refused_by_a_command(client: Client) -> None:
    done = client.run("inspect", "hf://datasets/org/name")
    assert done.returncode == 3 and "is a dataset" in done.stderr and not client.hub.requests


def test_a_source_is_named_by_its_path_in_the_cache(tmp_path: Path, model: Path) -> None:
    snapshot = tmp_path / "models--org--some-name/snapshots" / ("a" * 40)
    shutil.copytree(model, snapshot / "inner")
    assert source_name(snapshot) == f"org/some-name@{'a' * 40}"
    assert source_name(snapshot / "inner") == f"org/some-name@{'a' * 40}/inner"
    assert source_name(model) == model.name


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("hub/models--org--some-name/snapshots/" + "a" * 40, "some-name"),
        ("hub/models--gpt2/snapshots/" + "a" * 40, "gpt2"),
        ("hub/models/Qwen--Qwen2.5-7B/snapshots/master", "Qwen2.5-7B"),  # ModelScope
        ("hub/models/Qwen/Qwen2___5-7B", "Qwen2.5-7B"),  # its older caches, with a link to it
        ("mine/a___b", "a___b"),
        ("snapshots/step-7", "step-7"),
    ],
)
def test_a_model_in_a_cache_is_not_called_by_its_commit(folder: str, name: str, tmp_path: Path) -> None:
    (tmp_path / folder).mkdir(parents=True)
    if "Qwen2___5" in folder:
        (tmp_path / folder).with_name(name).symlink_to((tmp_path / folder).name)
        assert model_name((tmp_path / folder).with_name(name)) == name
    assert model_name(tmp_path / folder) == name


def test_graphs_of_what_is_not_the_user_s_own_go_into_a_new_folder(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--name/snapshots" / ("a" * 40)
    assert export_command(snapshot, " --task embed") == f"llmconv export {snapshot} --task embed -o OUT"
    assert export_command(tmp_path) == f"llmconv export {tmp_path}"


ADAPTER = CHECKPOINT.parent / "adapter"


@pytest.mark.slow
def test_several_models_in_folders_are_listed_before_anything_is_downloaded(client: Client, model: Path) -> None:
    repository = client.hub.repository("org/name")
    for place in ("zoo/one/", "zoo/two/"):
        upload(repository, model, place)
    for address in ("hf://org/name", "org/name", "hf://org/name/zoo"):
        done = client.run("inspect", address)
        assert done.returncode == 3
        assert "contains `hf://org/name/zoo/one`, `hf://org/name/zoo/two`" in done.stderr
        assert "give one of them: `hf://org/name/zoo/one`" in done.stderr
    assert not any("/resolve/" in request for request in client.hub.requests)


def test_a_folder_of_checkpoints_next_to_one_is_a_checkpoint(client: Client, model: Path) -> None:
    repository = client.hub.repository("org/name")
    for place in ("", "checkpoint-1/", "checkpoint-2/"):
        upload(repository, model, place)
    assert client.run("inspect", "org/name").returncode == 0


@pytest.mark.slow
def test_messages_name_the_address_and_not_the_cache(client: Client, model: Path) -> None:
    upload(client.hub.repository("org/name"), model, "inner/")
    done = client.run("generate", "hf://org/name/inner", "--prompt", "Once", "--no-export")
    assert done.returncode == 3
    assert "`hf://org/name/inner` has no graphs" in done.stderr
    assert "run `llmconv export hf://org/name/inner -o OUT`" in done.stderr


@pytest.mark.slow
def test_a_folder_without_a_scheme_is_told_the_address(client: Client) -> None:
    done = client.run("inspect", "org/name/inner")
    assert done.returncode == 3 and "is `hf://org/name/inner`" in done.stderr and not client.hub.requests


@pytest.mark.slow
def test_an_adapter_and_a_tokenizer_may_be_folders_of_a_repository(client: Client, model: Path, tmp_path: Path) -> None:
    repository = client.hub.repository("org/name")
    upload(repository, model, "base/")
    upload(repository, ADAPTER, "lora/")
    base, adapter = "hf://org/name/base", "hf://org/name/lora"
    done = client.run("generate", base, "--backend", "torch", "--adapter", adapter, "--prompt", "Once")
    assert done.returncode == 0, done.stderr
    done = client.run("merge-lora", base, adapter, "-o", tmp_path / "out", "--tokenizer", base)
    assert done.returncode == 0, done.stderr


def test_an_address_where_only_a_local_path_is_possible_is_a_usage_error(client: Client) -> None:
    done = client.run("verify", "--graph", "hf://org/name/decode.onnx")
    assert done.returncode == 2 and "`--graph` takes a path on this machine" in done.stderr


@pytest.mark.slow
def test_a_graph_in_the_cache_is_verified_and_changed_in_memory(client: Client, tmp_path: Path) -> None:
    to_hf(CHECKPOINT, tmp_path / "model")
    export(tmp_path / "model", tmp_path / "graphs", precision="float16")
    upload(client.hub.repository("org/name"), tmp_path / "graphs")
    done = client.run("generate", "org/name", "--prompt", "Once", "--max-new-tokens", "2")
    assert done.returncode == 0, done.stderr
    done = client.run("verify", "org/name", "-q", "--no-record")
    assert done.returncode == 0, done.stdout
