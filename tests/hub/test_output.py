"""`-o hf://org/name`: shards are sent as they are made, one commit at the end, `--resume` and `--overwrite`."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.builders.fake_hub import Fault
from tests.hub.conftest import CHECKPOINT, SHARDS, Client, contents

TO_HF = ("to-hf", CHECKPOINT, "--max-shard-size", SHARDS)


@pytest.mark.slow
def test_the_hub_gets_the_bytes_that_a_folder_would_have(client: Client, model: Path) -> None:
    done = client.run(*TO_HF, "-o", "hf://me/tiny")
    assert done.returncode == 0, done.stderr
    repository = client.hub.repositories["me/tiny"]
    found = repository.contents()
    assert found.pop("README.md").startswith(b"---\n") and found == contents(model)
    assert repository.private and len(repository.commits) == 2 and "to-hf" in repository.messages[-1]
    assert not client.cache() and "wrote hf://me/tiny" in done.stdout


@pytest.mark.slow
def test_the_disk_holds_one_shard(client: Client, model: Path) -> None:
    client.hub.hold = "POST /api/models/me/tiny/commit"
    process = client.start(*TO_HF, "-o", "hf://me/tiny")
    assert client.hub.held.wait(60)
    assert [path.suffix for path in client.cache()] == [".jsonl"]
    assert not client.hub.repositories["me/tiny"].contents()
    process.kill()
    process.communicate()


def test_killed_while_it_sends_it_goes_on_where_it_was(client: Client, model: Path) -> None:
    shards = sorted(model.glob("*.safetensors"))
    client.hub.hold = f"PUT /_objects/{_sha256(model, shards[2].name)}"
    process = client.start(*TO_HF, "-o", "hf://me/tiny")
    assert client.hub.held.wait(60)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    client.hub.hold = ""
    assert not client.hub.repositories["me/tiny"].contents() and len(client.hub.puts) == 2
    assert sorted(path.suffix for path in client.cache()) == [".jsonl", ".part"]
    done = client.run(*TO_HF, "-o", "hf://me/tiny", "--resume")
    assert done.returncode == 0, done.stderr
    assert len(client.hub.puts) == len(shards) and len({*client.hub.puts}) == len(shards)
    assert uploaded(client) == contents(model) and not client.cache()


def uploaded(client: Client) -> dict[str, bytes]:
    """All files of the repository, without the model card."""
    return {name: file for name, file in client.hub.repositories["me/tiny"].contents().items() if name != "README.md"}


def _sha256(model: Path, name: str) -> str:
    return str(json.loads((model / "llmconv.json").read_text())["files"][name]["sha256"])


@pytest.mark.slow
def test_objects_that_the_hub_lost_are_made_again(client: Client, model: Path) -> None:
    client.hub.faults = [Fault("commit/main")]
    assert client.run(*TO_HF, "-o", "hf://me/tiny").returncode == 4
    sent = len(client.hub.puts)
    lost = client.hub.puts[0]
    del client.hub.objects[lost]
    assert client.run(*TO_HF, "-o", "hf://me/tiny", "--resume").returncode == 0
    assert client.hub.puts[sent:] == [lost]
    assert uploaded(client) == contents(model)


@pytest.mark.slow
def test_a_resumed_run_does_not_read_finished_shards_again(client: Client, model: Path, tmp_path: Path) -> None:
    client.hub.faults = [Fault("commit/main")]
    assert client.run(*TO_HF, "-o", "hf://me/tiny").returncode == 4
    batches = sum("objects/batch" in request for request in client.hub.requests)
    assert client.run(*TO_HF, "-o", "hf://me/tiny", "--resume").returncode == 0
    assert sum("objects/batch" in request for request in client.hub.requests) == batches + 1


@pytest.mark.slow
def test_a_complete_repository_is_nothing_to_resume(client: Client) -> None:
    assert client.run(*TO_HF, "-o", "hf://me/tiny").returncode == 0
    again = client.run(*TO_HF, "-o", "hf://me/tiny", "--resume")
    assert again.returncode == 0 and "nothing to resume" in again.stderr
    assert len(client.hub.repositories["me/tiny"].commits) == 2
    other = client.run(*TO_HF, "-o", "hf://me/tiny", "--resume", "--dtype", "float16")
    assert other.returncode == 3 and "with other options" in other.stderr


@pytest.mark.slow
def test_a_model_is_replaced_only_when_asked(client: Client, tmp_path: Path) -> None:
    assert client.run(*TO_HF, "-o", "hf://me/tiny").returncode == 0
    repository = client.hub.repositories["me/tiny"]
    repository.put(README_md=b"# by hand")
    refused = client.run("to-hf", CHECKPOINT, "-o", "hf://me/tiny")
    assert refused.returncode == 3 and "already contains a model" in refused.stderr
    done = client.run("to-hf", CHECKPOINT, "-o", "hf://me/tiny", "--overwrite")
    assert done.returncode == 0, done.stderr
    names = repository.contents().keys()
    assert "model.safetensors" in names and "model.safetensors.index.json" not in names and "README.md" in names


@pytest.mark.slow
def test_the_model_card_follows_the_model_unless_it_was_edited(client: Client) -> None:
    assert client.run(*TO_HF, "-o", "hf://me/tiny").returncode == 0
    repository = client.hub.repositories["me/tiny"]
    assert b"float16" not in repository.contents()["README.md"]
    assert client.run(*TO_HF, "-o", "hf://me/tiny", "--overwrite", "--dtype", "float16").returncode == 0
    assert b"float16" in repository.contents()["README.md"]
    repository.put(README_md=b"# by hand")
    assert client.run(*TO_HF, "-o", "hf://me/tiny", "--overwrite").returncode == 0
    assert repository.contents()["README.md"] == b"# by hand"


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--overwrite",)])
@pytest.mark.parametrize("name", ["model_safetensors", "config_json"])
def test_a_model_of_others_is_never_replaced(client: Client, name: str, flags: tuple[str, ...]) -> None:
    repository = client.hub.repository("me/tiny")
    repository.put("main", **{name: b"{}"})
    done = client.run(*TO_HF, "-o", "hf://me/tiny", *flags)
    assert done.returncode == 3 and "which llmconv did not make" in done.stderr
    assert len(repository.commits) == 2 and not client.hub.puts


@pytest.mark.slow
def test_a_new_branch_has_this_model_alone(client: Client, model: Path) -> None:
    repository = client.hub.repository("me/tiny")
    repository.put(pytorch_model=b"of others", model_bin=b"of others")
    done = client.run(*TO_HF, "-o", "hf://me/tiny@v2")
    assert done.returncode == 0, done.stderr
    assert repository.contents("v2").keys() == {*contents(model), "README.md", "pytorch.model"}
    assert repository.contents().keys() == {"pytorch.model", "model.bin"}


def test_a_branch_that_moved_fails_and_nothing_is_visible(client: Client) -> None:
    repository = client.hub.repository("me/tiny")
    client.hub.hold = "POST /me/tiny.git/info/lfs"
    process = client.start(*TO_HF, "-o", "hf://me/tiny")
    assert client.hub.held.wait(60)
    repository.put(README_md=b"# in the meantime")
    client.hub.hold = ""
    _, err = process.communicate(timeout=120)
    assert process.returncode == 4 and "another commit in the meantime" in err
    assert repository.contents().keys() == {"README.md"}


@pytest.mark.slow
def test_other_commands_write_there_too(client: Client, model: Path, tmp_path: Path) -> None:
    adapter = CHECKPOINT.parent / "adapter"
    done = client.run("merge-lora", model, adapter, "-o", "hf://me/merged")
    assert done.returncode == 0, done.stderr
    local = client.run("merge-lora", model, adapter, "-o", tmp_path / "merged")
    assert local.returncode == 0, local.stderr
    found = client.hub.repositories["me/merged"].contents()
    wanted = contents(tmp_path / "merged")
    aside = ("llmconv.json", "README.md")
    assert {name: data for name, data in found.items() if name not in aside}.items() <= wanted.items()
    done = client.run("from-hf", model, "-o", "hf://me/meta", "--to", "meta")
    assert done.returncode == 0 and "consolidated.00.pth" in client.hub.repositories["me/meta"].contents()
    done = client.run("delta", "extract", model, tmp_path / "merged", "-o", "hf://me/delta")
    assert done.returncode == 0, done.stderr
    done = client.run("delta", "apply", model, "hf://me/delta", "-o", "hf://me/again")
    assert done.returncode == 0, done.stderr
    again = client.hub.repositories["me/again"].contents()
    weights = [name for name in wanted if name.endswith(".safetensors")]
    assert weights and all(again[name] == wanted[name] for name in weights)


def test_unchanged_shards_are_sent_from_where_they_are(client: Client, model: Path) -> None:
    done = client.run("to-hf", model, "-o", "hf://me/copy", "--max-shard-size", "keep")
    assert done.returncode == 0, done.stderr
    found = client.hub.repositories["me/copy"].contents()
    assert {name for name in found if name.endswith(".safetensors")} == {p.name for p in model.glob("*.safetensors")}
    assert all(found[path.name] == path.read_bytes() for path in model.glob("*.safetensors"))


@pytest.mark.slow
def test_a_dry_run_needs_no_token_and_leaves_nothing(client: Client) -> None:
    del client.environment["HF_TOKEN"]
    done = client.run(*TO_HF, "-o", "hf://me/tiny", "--dry-run")
    assert done.returncode == 0 and "would write hf://me/tiny" in done.stdout
    assert not client.hub.repositories and not client.cache()
    done = client.run(*TO_HF, "-o", "hf://me/tiny")
    assert done.returncode == 3 and "not logged in" in done.stderr and not client.cache()


@pytest.mark.slow
@pytest.mark.parametrize(
    "place", ["hf://me/tiny/folder", "hf://tiny", "hf://datasets/me/tiny", "hf://me/t@" + "a" * 40]
)
def test_places_that_cannot_be_written_are_refused(client: Client, place: str) -> None:
    done = client.run(*TO_HF, "-o", place)
    assert done.returncode == 3 and not client.hub.repositories


@pytest.mark.slow
def test_two_runs_do_not_mix(client: Client) -> None:
    client.hub.hold = "PUT /_objects"
    first = client.start(*TO_HF, "-o", "hf://me/tiny")
    assert client.hub.held.wait(60)
    second = client.run(*TO_HF, "-o", "hf://me/tiny")
    assert second.returncode == 4 and "another run uploads the same output" in second.stderr
    first.kill()
    first.communicate()
