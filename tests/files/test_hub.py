"""The hub: bare names, the files downloaded of a repository, and the messages without a network."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from llmconv.cli import main
from llmconv.errors import InputRefused
from llmconv.files.sources import is_hub_id, is_remote, local_path, needed
from tests.builders.torch_states import LLAMA, llama_state

COMMIT = "c" * 40


class Hub(BaseHTTPRequestHandler):
    """As much of the hub's protocol as one model needs: its description, and its files with their tags."""

    root: Path
    fetched: list[str]

    def do_GET(self) -> None:
        self._answer(with_content=True)

    def do_HEAD(self) -> None:
        self._answer(with_content=False)

    def _answer(self, *, with_content: bool) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/"):
            name, tree, _ = path.removeprefix("/api/models/").partition("/revision/")[0].partition("/tree/")
            folder = self.root / name
            if not folder.is_dir():
                return self._send(404, b"", {"X-Error-Code": "RepoNotFound"}, with_content)
            files = [str(file.relative_to(folder)) for file in sorted(folder.rglob("*")) if file.is_file()]
            told: object = {"id": name, "sha": COMMIT, "siblings": [{"rfilename": file} for file in files]}
            if tree:
                sizes = {file: (folder / file).stat().st_size for file in files}
                told = [{"type": "file", "path": file, "size": sizes[file], "oid": file} for file in files]
            return self._send(200, json.dumps(told).encode(), {}, with_content)
        name, _, rest = path.lstrip("/").partition("/resolve/")
        file = self.root / name / rest.partition("/")[2]
        if not file.is_file():
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound"}, with_content)
        if with_content:
            self.fetched.append(file.name)
        tags = {"ETag": f'"{file.name}"', "X-Repo-Commit": COMMIT}
        return self._send(200, file.read_bytes(), tags, with_content)

    def _send(self, status: int, content: bytes, headers: dict[str, str], with_content: bool) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_content:
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[tuple[Path, dict[str, str], list[str]]]:
    """A folder that is served as the hub, the environment that finds it, and the names of the files it gave."""
    fetched: list[str] = []
    kind = type("Served", (Hub,), {"root": tmp_path / "hub", "fetched": fetched})
    server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    environment = {
        **os.environ,
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HOME": str(tmp_path / "c"),
    }
    environment.pop("HF_HUB_OFFLINE", None)
    yield tmp_path / "hub", {**environment, "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1"}, fetched
    server.shutdown()
    server.server_close()


def save_llama(folder: Path) -> Path:
    from safetensors.torch import save_file  # noqa: PLC0415

    folder.mkdir(parents=True)
    save_file(llama_state(), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(LLAMA | {"architectures": ["LlamaForCausalLM"]}))
    return folder


def run(environment: dict[str, str], *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "llmconv", *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.slow
def test_a_bare_name_is_downloaded_and_only_what_the_model_needs(
    tmp_path: Path, hub: tuple[Path, dict[str, str], list[str]]
) -> None:
    root, environment, fetched = hub
    folder = save_llama(root / "tiny")
    for name in ("pytorch_model.bin", "tf_model.h5", "flax_model.msgpack", "model.gguf", "onnx/model.onnx"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"unwanted")
    (folder / "tokenizer.json").write_text("{}")
    done = run(environment, "to-hf", "tiny", "-o", tmp_path / "out", "--dtype", "bfloat16")
    assert done.returncode == 0, done.stderr
    assert {*fetched} == {"config.json", "model.safetensors", "tokenizer.json"}
    again = run({**environment, "HF_HUB_OFFLINE": "1"}, "inspect", "tiny")
    assert again.returncode == 0, again.stderr


@pytest.mark.slow
def test_a_name_that_the_hub_does_not_have_is_refused(hub: tuple[Path, dict[str, str], list[str]]) -> None:
    done = run(hub[1], "inspect", "nothing")
    assert done.returncode == 3
    assert "`nothing` does not exist, neither on this machine nor on the hub" in done.stderr


@pytest.mark.slow
def test_an_adapter_and_its_base_come_by_their_names(
    tmp_path: Path, hub: tuple[Path, dict[str, str], list[str]]
) -> None:
    from safetensors.torch import save_file  # noqa: PLC0415
    from torch import ones  # noqa: PLC0415

    root, environment, fetched = hub
    save_llama(root / "tiny")
    (root / "acme" / "lora").mkdir(parents=True)
    name = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
    pairs = {name.format(layer, part): ones((2, 8) if part == "A" else (8, 2)) for layer in range(2) for part in "AB"}
    save_file(pairs, root / "acme" / "lora" / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q_proj"]}
    (root / "acme" / "lora" / "adapter_config.json").write_text(
        json.dumps(config | {"base_model_name_or_path": "tiny"})
    )
    (root / "acme" / "lora" / "optimizer.pt").write_bytes(b"unwanted")
    done = run(environment, "merge-lora", "tiny", "acme/lora", "-o", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "optimizer.pt" not in fetched and "warning" not in done.stderr
    assert (tmp_path / "out" / "model.safetensors").is_file()


@pytest.mark.slow
def test_the_message_without_network_and_cache(tmp_path: Path) -> None:
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = run(environment, "inspect", "gpt2")
    assert done.returncode == 3
    assert "`gpt2` does not exist on this machine and is not in the hub's cache; HF_HUB_OFFLINE is set" in done.stderr
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_ENDPOINT": "http://127.0.0.1:9", "NO_PROXY": "127.0.0.1"}
    environment.pop("HF_HUB_OFFLINE", None)
    done = run(environment, "inspect", "gpt2")
    assert done.returncode == 3 and "the hub cannot be reached" in done.stderr


# Names


@pytest.mark.parametrize("name", ["gpt2", "org/name", "org/name@main", "gpt2@v1", "opt-1.3b", "Qwen2.5-0.5B"])
def test_these_may_be_models_of_the_hub(name: str) -> None:
    assert is_hub_id(name) and is_remote(name)


@pytest.mark.parametrize(
    "name", ["model.pt", "x.safetensors", "run.yaml", "a/b/c", "/tmp/none", "../x", "x.tar.gz", ""]
)
def test_these_are_paths(name: str) -> None:
    assert not is_hub_id(name)


def test_a_local_path_goes_before_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2").mkdir()
    assert not is_hub_id("gpt2") and local_path("gpt2") == Path("gpt2")


def test_a_file_that_is_not_there_is_not_looked_for_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputRefused, match=r"`model\.pt` does not exist"):
        local_path("model.pt")


FILES: dict[str, tuple[list[str], list[str]]] = {
    "safetensors before torch": (
        ["README.md", "config.json", "model.safetensors", "pytorch_model.bin", "tf_model.h5", "onnx/model.onnx"],
        ["README.md", "config.json", "model.safetensors"],
    ),
    "shards": (
        ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"],
        ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"],
    ),
    "torch files alone": (["config.json", "pytorch_model.bin", "rust_model.ot"], ["config.json", "pytorch_model.bin"]),
    "an adapter": (
        ["adapter_config.json", "adapter_model.safetensors", "optimizer.pt", "tokenizer.model"],
        ["adapter_config.json", "adapter_model.safetensors", "tokenizer.model"],
    ),
    "a training checkpoint": (["consolidated.00.pth", "params.json"], ["consolidated.00.pth", "params.json"]),
    "an export": (
        ["llmconv.json", "model.safetensors", "decode.onnx"],
        ["llmconv.json", "model.safetensors", "decode.onnx"],
    ),
}


@pytest.mark.parametrize(("listed", "wanted"), FILES.values(), ids=FILES.keys())
def test_only_the_files_that_a_model_needs_are_downloaded(listed: list[str], wanted: list[str]) -> None:
    assert needed(listed) == wanted


# Commands that write into a folder, or check one


def llmconv(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.mark.parametrize("name", ["gpt2", "org/name", "s3://bucket/model"])
def test_graphs_are_not_written_next_to_weights_from_elsewhere(name: str) -> None:
    done = llmconv("export", name)
    assert done.exit_code == 3
    assert "is not a local folder, so graphs cannot be written into it" in done.stderr
    assert f"llmconv export {name} -o OUT" in done.stderr


def test_verify_looks_for_a_name_in_the_cache_as_other_commands_do() -> None:
    done = llmconv("verify", "org/name")
    assert (
        done.exit_code == 3 and "`org/name` does not exist on this machine and is not in the hub's cache" in done.stderr
    )


def cached(folder: Path, hub: Path, name: str) -> None:
    """Lays a folder out as the hub's cache does."""
    home = hub / f"models--{name.replace('/', '--')}"
    shutil.copytree(folder, home / "snapshots" / COMMIT)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(COMMIT)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of peft about its own use of transformers
def test_generate_takes_an_adapter_by_its_name(talking: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from peft import LoraConfig, get_peft_model  # noqa: PLC0415
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(talking), LoraConfig(target_modules=["q_proj"]))
    model.save_pretrained(tmp_path / "lora")
    cached(tmp_path / "lora", tmp_path / "hub", "acme/lora")
    done = llmconv("generate", talking, "Once", "--backend", "torch", "--adapter", "acme/lora", "--max-new-tokens", 2)
    assert done.exit_code == 0, done.stderr
