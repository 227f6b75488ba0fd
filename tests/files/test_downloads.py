"""URIs are fetched into a temporary folder, which is removed when nothing needs it any more."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pytest
from click.testing import CliRunner

from llmconv.cli import main
from llmconv.convert import inspect, to_hf
from llmconv.errors import InputRefused
from llmconv.export import export
from llmconv.files.sources import fetching, local_path, remove_downloads
from llmconv.generation import TextModel, generate
from tests.builders.temporary import left_empty

CHECKPOINT = Path(__file__).parents[2] / "examples/tiny-llama/ep4-ba2400-rank0.pt"
ADAPTER = CHECKPOINT.parent / "adapter"


@pytest.fixture
def temporary(tmp_path: Path) -> Iterator[Path]:
    """The temporary folder of a test, which it leaves empty."""
    with left_empty(tmp_path / "temporary") as folder:
        yield folder


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder; do not write into it."""
    folder = tmp_path_factory.mktemp("models") / "base"
    to_hf(CHECKPOINT, folder)
    return folder


@pytest.fixture
def in_memory(base: Path) -> Iterator[str]:
    """The URI of the same folder in fsspec's own memory."""
    memory = fsspec.filesystem("memory")
    memory.put(str(base), "/llmconv/base", recursive=True)
    yield "memory://llmconv/base"
    memory.rm("/llmconv", recursive=True)


def run(*line: Any, **more: Any) -> str:
    """What a command prints."""
    result = CliRunner().invoke(main, [str(word) for word in line], **more)
    assert result.exit_code == 0, result.output
    return result.stdout


def uri(path: Path) -> str:
    return f"file://{path.absolute()}"


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--dry-run"]], ids=["written", "dry run"])
def test_a_conversion_leaves_nothing(temporary: Path, tmp_path: Path, more: list[str]) -> None:
    assert "llama" in run("to-hf", uri(CHECKPOINT), "-o", tmp_path / "out", *more)


@pytest.mark.slow
def test_inspect_leaves_nothing(temporary: Path) -> None:
    found = json.loads(run("inspect", uri(CHECKPOINT), "--json"))
    assert (found["format"], found["path"]) == ("composer", uri(CHECKPOINT))
    assert uri(CHECKPOINT) in run("inspect", uri(CHECKPOINT))


@pytest.mark.slow
def test_a_merge_leaves_nothing(temporary: Path, base: Path, tmp_path: Path) -> None:
    run("merge-lora", uri(base), uri(ADAPTER), "-o", tmp_path / "out", "--check")


@pytest.mark.slow
def test_the_way_back_leaves_nothing(temporary: Path, base: Path, tmp_path: Path) -> None:
    run("from-hf", uri(base), "--to", "meta", "-o", tmp_path / "out")


@pytest.mark.slow
def test_deltas_leave_nothing(temporary: Path, base: Path, tmp_path: Path) -> None:
    run("delta", "extract", uri(base), uri(base), "-o", tmp_path / "delta")
    run("delta", "apply", uri(base), uri(tmp_path / "delta"), "-o", tmp_path / "out")


@pytest.mark.slow
def test_the_settings_of_a_conversion_may_be_fetched_too(temporary: Path, base: Path, tmp_path: Path) -> None:
    run("to-hf", CHECKPOINT, "-o", tmp_path / "out", "--tokenizer", uri(base / "tokenizer.json"))
    assert (tmp_path / "out/tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()


@pytest.mark.slow
def test_an_export_from_memory_leaves_nothing(temporary: Path, in_memory: str, tmp_path: Path) -> None:
    exported = export(in_memory, str(tmp_path / "out"), unified=True)
    assert (exported.folder / "model.onnx").is_file()
    assert (exported.folder / "model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("model", ["memory://llmconv/base", "file:///nowhere", "org/name"])
def test_graphs_are_not_written_into_a_folder_that_vanishes(temporary: Path, model: str) -> None:
    with pytest.raises(InputRefused, match="not a local folder, so graphs cannot be written into it") as caught:
        export(model)
    assert "-o OUT`" in caught.value.hint


@pytest.mark.slow
def test_a_verification_leaves_nothing(temporary: Path, talking: Path) -> None:
    assert "PASS" in run("verify", uri(talking), "--reference", uri(talking), "--scenario", "rows exchanged")


@pytest.mark.slow
def test_text_from_a_fetched_model_leaves_nothing(temporary: Path, talking: Path) -> None:
    assert run("generate", uri(talking), "ab", "--max-new-tokens", "2")
    assert generate(uri(talking), "ab", max_new_tokens=2).completions[0].tokens


@pytest.mark.slow
def test_a_chat_leaves_nothing(temporary: Path, chatting: Path) -> None:
    assert run("chat", uri(chatting), "--json", "--max-new-tokens", "2", input="hello\n")


@pytest.mark.slow
def test_an_open_model_keeps_its_files_for_as_long_as_it_lives(temporary: Path, talking: Path) -> None:
    model = TextModel.open(uri(talking))
    assert model.folder.is_dir()
    assert model.folder.is_relative_to(temporary)
    folder = model.folder
    del model
    gc.collect()
    assert not folder.exists()


@pytest.mark.slow
def test_the_result_of_inspect_is_readable_as_long_as_it_is_alive(temporary: Path) -> None:
    found = inspect(uri(CHECKPOINT))
    assert found.file_bytes == CHECKPOINT.stat().st_size
    assert next(iter(found.tensors.values())).read().size


@pytest.mark.slow
def test_a_plan_can_be_read_for_as_long_as_it_lives(temporary: Path, tmp_path: Path) -> None:
    plan = to_hf(uri(CHECKPOINT), tmp_path / "out", dry_run=True)
    assert next(iter(plan.checkpoint.values())).read().size


@pytest.mark.slow
def test_an_error_leaves_nothing(temporary: Path, tmp_path: Path) -> None:
    (tmp_path / "junk.pt").write_bytes(b"junk")
    with pytest.raises(InputRefused):
        to_hf(uri(tmp_path / "junk.pt"), tmp_path / "out")
    with pytest.raises(InputRefused):
        TextModel.open(uri(tmp_path / "junk.pt"))
    assert not [*temporary.iterdir()]


@pytest.mark.slow
def test_ctrl_c_leaves_nothing(temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        assert [*temporary.iterdir()]
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["llmconv.convert.to_hugging_face"], "plan_checkpoint", interrupted)
    with pytest.raises(KeyboardInterrupt):
        to_hf(uri(CHECKPOINT), tmp_path / "out")
    assert not [*temporary.iterdir()]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_terminated_process_leaves_nothing(temporary: Path, chatting: Path, number: int) -> None:
    command = [sys.executable, "-m", "llmconv", "chat", uri(chatting), "--json", "--max-new-tokens", "1"]
    heeding = partial(signal.signal, number, signal.SIG_DFL)  # a shell has background jobs ignore SIGINT
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, env=dict(os.environ), preexec_fn=heeding, **pipes) as process:
        assert process.stdin and process.stdout
        process.stdin.write(b"hello\n")
        process.stdin.flush()
        assert process.stdout.readline()
        assert [*temporary.glob("llmconv-*")]
        process.send_signal(number)
        process.wait(30)
    assert not [*temporary.glob("llmconv-*")]


@pytest.mark.slow
def test_downloads_outside_of_a_call_are_removed_with_all(temporary: Path) -> None:
    path = local_path(uri(CHECKPOINT))
    assert path.is_file()
    remove_downloads()
    assert not path.exists()


@pytest.mark.slow
def test_an_inner_call_keeps_the_downloads_of_an_outer_one(temporary: Path) -> None:
    with fetching():
        outer = local_path(uri(CHECKPOINT))
        with fetching():
            inner = local_path(uri(CHECKPOINT))
        assert outer.is_file()
        assert not inner.exists()


@pytest.mark.slow
def test_a_folder_named_with_a_slash_at_the_end_is_fetched_whole(temporary: Path, base: Path) -> None:
    with fetching():
        assert (local_path(uri(base) + "/") / "model.safetensors").is_file()


@pytest.mark.slow
def test_an_address_never_means_a_local_folder_of_that_name(
    temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "memory:/b").mkdir(parents=True)
    with pytest.raises(InputRefused, match="cannot fetch"):
        local_path("memory://b/x/y")
    with pytest.raises(InputRefused, match="give a URI as text|nor a complete URI"):
        local_path(Path("memory://b"))
    assert local_path("./memory:/b").is_dir()


@pytest.mark.slow
def test_the_signature_of_a_url_is_not_published_as_the_name_of_the_source(temporary: Path, tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    memory.put(str(CHECKPOINT), "/llmconv/rank0.pt?signature=canary")
    to_hf("memory://llmconv/rank0.pt?signature=canary", tmp_path / "out")
    memory.rm("/llmconv", recursive=True)
    manifest = (tmp_path / "out/llmconv.json").read_text()
    assert '"source": "rank0.pt"' in manifest and "canary" not in manifest


@pytest.mark.slow
@pytest.mark.parametrize(
    "address", ["memory://me:canary@host/none.pt?signature=canary", "https://canary@host/x#canary"]
)
def test_no_credential_of_a_uri_is_in_an_error(address: str, temporary: Path, tmp_path: Path) -> None:
    for call in (
        partial(to_hf, address, tmp_path / "out"),
        partial(export, address),
        partial(to_hf, CHECKPOINT, address),
    ):
        with pytest.raises(InputRefused) as caught:
            call()
        assert "canary" not in caught.value.message + caught.value.hint


@pytest.mark.slow
def test_without_a_package_for_a_store_the_hint_names_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmconv.files.sources.find_spec", lambda name: None)  # as if obstore were not installed
    with pytest.raises(InputRefused, match="s3fs") as caught:
        local_path("s3://bucket/model")
    assert "pip install obstore" in caught.value.hint
