"""`llmconv push`: one commit of exactly the checked bytes, or none."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest

from tests.builders.fake_hub import Fault
from tests.hub.conftest import CANARY, Client, contents


@pytest.fixture
def folder(model: Path, tmp_path: Path) -> Path:
    """A copy of the model, to change."""
    return Path(shutil.copytree(model, tmp_path / "mine"))


@pytest.mark.slow
def test_the_hub_has_the_bytes_of_the_folder_and_a_model_card(client: Client, model: Path) -> None:
    done = client.run("push", model, "me/tiny", "--verify-upload")
    assert done.returncode == 0, done.stderr
    found = client.hub.repositories["me/tiny"].contents()
    card = found.pop("README.md")
    assert found == contents(model)
    assert b"llmconv to-hf" in card and len(client.hub.repositories["me/tiny"].commits) == 2
    assert "verified" in done.stdout and "/me/tiny/commit/" in done.stdout


def test_the_result_in_json(client: Client, model: Path) -> None:
    told = json.loads(client.run("push", model, "me/tiny", "--private", "--json", "-q").stdout)
    repository = client.hub.repositories["me/tiny"]
    assert told["commit"] == repository.branches["main"] and repository.private
    assert told["model_card"] and told["written"] and told["differing"] is None
    assert set(told["files"]) == {*contents(model), "README.md"}


@pytest.mark.slow
def test_a_dry_run_writes_nothing(client: Client, model: Path) -> None:
    done = client.run("push", model, "me/tiny", "--dry-run")
    assert done.returncode == 0 and "would push" in done.stdout and "model.safetensors.index.json" in done.stdout
    assert not client.hub.repositories and not client.hub.puts


@pytest.mark.slow
def test_what_is_equal_is_not_committed_again(client: Client, model: Path) -> None:
    client.run("push", model, "me/tiny")
    sent = len(client.hub.puts)
    again = client.run("push", model, "me/tiny", "--verify-upload")
    assert again.returncode == 0 and "nothing to do" in again.stdout and "verified" in again.stdout
    assert len(client.hub.puts) == sent and len(client.hub.repositories["me/tiny"].commits) == 2


def test_only_what_changed_is_sent_and_files_that_are_gone_are_deleted(
    client: Client, model: Path, tmp_path: Path
) -> None:
    client.run("push", model, "me/tiny")
    sent = len(client.hub.puts)
    whole = client.run("to-hf", model, "-o", tmp_path / "whole", "--max-shard-size", "5GB")
    assert whole.returncode == 0, whole.stderr
    done = client.run("push", tmp_path / "whole", "me/tiny")
    assert done.returncode == 0, done.stderr
    found = client.hub.repositories["me/tiny"].contents()
    assert found.keys() - {"README.md"} == contents(tmp_path / "whole").keys()
    assert len(client.hub.puts) == sent + 1


def test_a_branch_is_made_and_main_is_left_alone(client: Client, model: Path) -> None:
    repository = client.hub.repository("me/tiny")
    repository.put(pytorch_model_bin=b"of others")
    repository.put(README_md=b"# by hand")
    before = repository.contents()
    done = client.run("push", model, "me/tiny", "--revision", "feature/x")
    assert done.returncode == 0, done.stderr
    assert repository.contents() == before
    assert repository.contents("feature/x").keys() == {*contents(model), *before} - {"pytorch.model_bin"} | {
        name for name in before if name.startswith("pytorch")
    }


@pytest.mark.slow
def test_a_branch_with_the_files_of_main_is_made(client: Client, model: Path) -> None:
    assert client.run("push", model, "me/tiny").returncode == 0
    repository = client.hub.repositories["me/tiny"]
    planned = client.run("push", model, "me/tiny", "--revision", "v2", "--dry-run")
    assert planned.stdout.startswith("would push") and "v2" not in repository.branches
    done = client.run("push", model, "me/tiny", "--revision", "v2", "--verify-upload")
    assert done.returncode == 0 and done.stdout.startswith("pushed"), done.stderr
    assert repository.branches["v2"] == repository.branches["main"]
    assert "nothing to do" in client.run("push", model, "me/tiny", "--revision", "v2").stdout


@pytest.mark.slow
def test_a_pull_request_needs_no_write_access(client: Client, model: Path) -> None:
    client.hub.repository("you/tiny").read_only = True
    denied = client.run("push", model, "you/tiny")
    assert denied.returncode == 3 and "may not write to `you/tiny`" in denied.stderr and "***" in denied.stderr
    done = client.run("push", model, "you/tiny", "--pr", "--message", "a model")
    assert done.returncode == 0, done.stderr
    repository = client.hub.repositories["you/tiny"]
    assert contents(model).items() <= repository.contents("refs/pr/1").items() and not repository.contents()
    assert "/discussions/1" in done.stdout and repository.messages[-1].strip() == "a model"


# Killed, interrupted, refused


@pytest.mark.slow
def test_killed_before_the_commit_nothing_is_visible_and_nothing_is_sent_twice(client: Client, model: Path) -> None:
    client.hub.hold = "POST /api/models/me/tiny/commit"
    process = client.start("push", model, "me/tiny")
    assert client.hub.held.wait(60)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    client.hub.hold = ""
    assert not client.hub.repositories["me/tiny"].contents()
    sent = list(client.hub.puts)
    assert len(sent) == len([*model.glob("*.safetensors")])
    assert client.run("push", model, "me/tiny").returncode == 0
    assert client.hub.puts == sent
    assert contents(model).items() <= client.hub.repositories["me/tiny"].contents().items()


@pytest.mark.slow
def test_a_branch_that_moved_is_not_overwritten(client: Client, model: Path) -> None:
    repository = client.hub.repository("me/tiny")
    client.hub.hold = "POST /me/tiny.git/info/lfs"
    process = client.start("push", model, "me/tiny")
    assert client.hub.held.wait(60)
    repository.put(README_md=b"# in the meantime")
    client.hub.hold = ""
    _, err = process.communicate(timeout=120)
    assert process.returncode == 4 and "got another commit in the meantime" in err
    assert repository.contents() == {"README.md": b"# in the meantime"}


@pytest.mark.slow
@pytest.mark.parametrize("status", [503, 0], ids=["busy", "cut"])
def test_a_commit_that_gets_no_answer_fails_and_can_be_run_again(client: Client, model: Path, status: int) -> None:
    client.hub.faults = [Fault("commit/main", status)]
    done = client.run("push", model, "me/tiny", "-v")
    assert done.returncode == 4, done.stderr
    assert "run the same command again" in done.stderr and "signature" not in done.stderr
    sent = len(client.hub.puts)
    assert client.run("push", model, "me/tiny").returncode == 0 and len(client.hub.puts) == sent


@pytest.mark.slow
def test_a_busy_store_is_asked_again(client: Client, model: Path) -> None:
    client.hub.faults = [Fault("PUT /_objects")]
    done = client.run("push", model, "me/tiny")
    assert done.returncode == 0 and "signature" not in done.stderr


@pytest.mark.slow
def test_a_connection_that_breaks_while_a_file_is_sent_loses_only_that_file(client: Client, model: Path) -> None:
    client.hub.faults = [Fault("PUT /_objects", 0)]
    done = client.run("push", model, "me/tiny")
    assert done.returncode in (0, 4) and (done.returncode == 0 or "broke off" in done.stderr)
    assert client.run("push", model, "me/tiny").returncode == 0
    assert len(client.hub.puts) == len({*client.hub.puts}) == len([*model.glob("*.safetensors")])


@pytest.mark.slow
def test_a_terminated_push_can_be_run_again(client: Client, model: Path) -> None:
    client.hub.hold = "POST /api/models/me/tiny/commit"
    process = client.start("push", model, "me/tiny")
    assert client.hub.held.wait(60)
    process.terminate()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 143 and "run the same command again" in err
    client.hub.hold = ""
    assert client.run("push", model, "me/tiny").returncode == 0


def test_a_gated_repository_is_refused(client: Client, model: Path) -> None:
    client.hub.repository("you/tiny").gated = True
    done = client.run("push", model, "you/tiny")
    assert done.returncode == 3 and "gated" in done.stderr


@pytest.mark.slow
def test_a_token_that_the_hub_does_not_know_is_refused(client: Client, model: Path) -> None:
    client.hub.token = "hf_another"
    done = client.run("push", model, "me/tiny", "-v")
    assert done.returncode == 3 and "does not accept the token" in done.stderr


def test_without_a_token_the_way_to_log_in_is_named(client: Client, model: Path) -> None:
    del client.environment["HF_TOKEN"]
    done = client.run("push", model, "me/tiny")
    assert done.returncode == 3 and "not logged in" in done.stderr and "hf auth login" in done.stderr


@pytest.mark.slow_rows("hf_\\xf6\\xe4\\xfc")
@pytest.mark.parametrize("token", ["hf_öäü", "hf_a b", "hf_a\nb"])
def test_a_token_that_cannot_be_one_is_not_shown(client: Client, model: Path, token: str) -> None:
    client.environment["HF_TOKEN"] = token
    done = client.run("push", model, "me/tiny", "-v")
    assert done.returncode == 3 and token not in done.stderr


@pytest.mark.slow
def test_a_hub_that_cannot_be_reached_is_a_failure(client: Client, model: Path) -> None:
    client.environment["HF_ENDPOINT"] = "http://127.0.0.1:9"
    done = client.run("push", model, "me/tiny", "-v")
    assert done.returncode == 4 and "cannot be reached" in done.stderr


@pytest.mark.slow
def test_no_network_is_asked_for_where_none_is_allowed(client: Client, model: Path) -> None:
    client.environment["HF_HUB_OFFLINE"] = "1"
    done = client.run("push", model, "me/tiny")
    assert done.returncode == 3 and "HF_HUB_OFFLINE is set" in done.stderr


@pytest.mark.slow
def test_a_public_repository_does_not_get_what_is_to_be_private(client: Client, model: Path) -> None:
    client.hub.repository("me/tiny")
    done = client.run("push", model, "me/tiny", "--private")
    assert done.returncode == 3 and "is public" in done.stderr and not client.hub.puts


@pytest.mark.slow
def test_the_difference_is_found_where_the_hub_has_other_bytes(client: Client, model: Path) -> None:
    client.hub.corrupt = True
    done = client.run("push", model, "me/tiny", "--verify-upload")
    assert done.returncode == 1 and "FAILED | config.json" in done.stdout


# The folder


@pytest.mark.slow
def test_damage_is_found_before_anything_is_sent(client: Client, folder: Path) -> None:
    shard = sorted(folder.glob("*.safetensors"))[0]
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    done = client.run("push", folder, "me/tiny")
    assert done.returncode == 3 and f"`{shard.name}` is damaged" in done.stderr
    assert not client.hub.repositories


@pytest.mark.quick_rows("short")
@pytest.mark.parametrize("harm", ["missing", "short"])
def test_an_incomplete_folder_is_refused(client: Client, folder: Path, harm: str) -> None:
    shard = sorted(folder.glob("*.safetensors"))[-1]
    shard.unlink() if harm == "missing" else shard.write_bytes(shard.read_bytes()[:-1])
    done = client.run("push", folder, "me/tiny")
    assert done.returncode == 3 and shard.name in done.stderr and not client.hub.repositories


@pytest.mark.slow
def test_foreign_files_are_refused_and_hidden_ones_left_out(client: Client, folder: Path) -> None:
    (folder / ".env").write_text("secret")
    (folder / "README.md").write_text("# mine\n")
    (folder / "LICENSE").write_text("free\n")
    (folder / "optimizer.pt").write_bytes(b"x")
    refused = client.run("push", folder, "me/tiny")
    assert refused.returncode == 3 and "`optimizer.pt`" in refused.stderr
    (folder / "optimizer.pt").unlink()
    done = client.run("push", folder, "me/tiny")
    assert done.returncode == 0 and "left out: `.env`" in done.stderr
    found = client.hub.repositories["me/tiny"].contents()
    assert found["README.md"] == b"# mine\n" and found["LICENSE"] == b"free\n" and ".env" not in found


def test_a_folder_of_others_is_refused(client: Client, folder: Path) -> None:
    (folder / "llmconv.json").unlink()
    done = client.run("push", folder, "me/tiny")
    assert done.returncode == 3 and "has no `llmconv.json`" in done.stderr


def test_a_link_that_leads_out_of_the_folder_is_refused(client: Client, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "private").write_text("private")
    (folder / "README.md").symlink_to(tmp_path / "private")
    done = client.run("push", folder, "me/tiny")
    assert done.returncode == 3 and "leads out of the folder" in done.stderr and not client.hub.repositories


def test_a_link_in_the_folder_becomes_a_file_that_is_sent_once(client: Client, folder: Path) -> None:
    manifest = json.loads((folder / "llmconv.json").read_text())
    (shard, *_) = sorted(path.name for path in folder.glob("*.safetensors"))
    (folder / "onnx").mkdir()
    (folder / "onnx/copy.safetensors").symlink_to(f"../{shard}")
    manifest["files"]["onnx/copy.safetensors"] = {"link": f"../{shard}"}
    manifest["files"][shard] = {"bytes": manifest["files"][shard]["bytes"], "clone_of": "base.safetensors"}
    (folder / "llmconv.json").write_text(json.dumps(manifest))
    assert client.run("push", folder, "me/tiny", "--verify-upload").returncode == 0
    found = client.hub.repositories["me/tiny"].contents()
    assert found["onnx/copy.safetensors"] == found[shard] and len({*client.hub.puts}) == len(client.hub.puts)


# The repository


@pytest.mark.slow
def test_weights_of_others_are_not_mixed_with_these(client: Client, model: Path) -> None:
    client.hub.repository("me/tiny").files()  # a new one is accepted
    client.hub.repositories["me/tiny"].put(model_safetensors=b"of others")
    done = client.run("push", model, "me/tiny")
    assert done.returncode == 3 and "`model.safetensors`, which llmconv did not make" in done.stderr
    assert not client.hub.puts


@pytest.mark.slow
def test_other_files_are_kept_but_not_replaced(client: Client, model: Path) -> None:
    repository = client.hub.repository("me/tiny")
    repository.put(README_md=b"# by hand")
    repository.put(notes_txt=b"kept")
    assert client.run("push", model, "me/tiny").returncode == 0
    assert repository.contents()["README.md"] == b"# by hand" and repository.contents()["notes.txt"] == b"kept"
    other = client.hub.repository("me/other")
    other.put(config_json=b"{}")
    done = client.run("push", model, "me/other")
    assert done.returncode == 3 and "contains another `config.json`" in done.stderr


@pytest.mark.slow
def test_the_gitignore_of_a_repository_leaves_nothing_out(client: Client, model: Path) -> None:
    repository = client.hub.repository("me/tiny")
    repository.put(_gitignore=b"*.safetensors\n")
    assert client.run("push", model, "me/tiny", "--verify-upload").returncode == 0
    assert contents(model).items() <= repository.contents().items()
    client.hub.always_ignores = True
    repository.add("main", {name: kept for name, kept in repository.files().items() if name.startswith(".")})
    done = client.run("push", model, "me/tiny")
    assert done.returncode == 3 and "`.gitignore` of `me/tiny` leaves out" in done.stderr


@pytest.mark.quick_rows("words2-is not a repository that can be written", "words7-not a name that the Hub accepts")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a/b/c"], "not a repository on the Hub"),
        (["hf://datasets/me/x"], "a dataset"),
        (["tiny"], "is not a repository that can be written"),
        (["me/x@v1", "--revision", "v2"], "another branch"),
        (["me/x", "--revision", "v2", "--pr"], "begins at `main`"),
        (["me/x", "--revision", "0" * 40], "is a commit"),
        (["me/none", "--pr"], "does not exist"),
        (["me/a--b"], "not a name that the Hub accepts"),
    ],
)
def test_impossible_requests_are_refused(client: Client, model: Path, words: list[str], message: str) -> None:
    done = client.run("push", model, *words)
    assert done.returncode in (2, 3) and message in done.stderr
    assert CANARY not in done.stderr and not client.hub.repositories
