"""A server and a terminal over stages in other processes: parallel requests, a lost stage, a new one."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from click.testing import CliRunner

from llmconv.cli import main
from llmconv.export.exporter import export
from tests.builders.server_process import ROOT, Served, serving
from tests.builders.stage_process import serving_stage
from tests.builders.talking import save_letters
from tests.conftest import save_tiny

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with graphs in two stages, and a tokenizer."""
    home = tmp_path_factory.mktemp("staged")
    source = save_tiny("llama", home / "source", max_position_embeddings=512)
    export(source, home := home / "model", stages=2)
    return save_letters(home)


def complete(served: Served, prompt: str, tokens: int = 24) -> str:
    """The continuation of a prompt."""
    body = json.dumps({"prompt": prompt, "max_tokens": tokens, "temperature": 0}).encode()
    request = urllib.request.Request(
        f"{served.address}/v1/completions", body, {"Content-Type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return str(json.load(response)["choices"][0]["text"])


def test_requests_run_in_parallel_and_the_server_outlives_its_stage(folder: Path) -> None:
    texts = ["abc", "hello", "x", "stages of a model", "abcd"]
    with serving(folder) as whole:
        expected = [complete(whole, text) for text in texts]
    with serving_stage(folder, 2) as stage, serving(folder, "--stage-at", stage.address, "--parallel", "3") as served:
        with ThreadPoolExecutor(5) as pool:
            assert list(pool.map(lambda text: complete(served, text), texts)) == expected
        stage.process.send_signal(signal.SIGKILL)
        stage.process.wait()
        with pytest.raises(urllib.error.HTTPError) as caught:
            complete(served, "abc")
        assert caught.value.code == 503
        error = json.load(caught.value)["error"]
        caught.value.close()
        assert error["code"] == "stage_failed"
        assert "is lost" in error["message"]
        with serving_stage(folder, 2, "--listen", stage.address):
            assert [complete(served, text) for text in texts] == expected


def test_generate_ends_with_exit_code_4_when_its_stage_is_killed(folder: Path) -> None:
    with serving_stage(folder, 2) as stage:
        arguments = ["generate", str(folder), "abc", "--stage-at", stage.address, "--stream", "--max-new-tokens", "450"]
        command = [sys.executable, "-m", "llmconv", *arguments]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.read(1)
            stage.process.send_signal(signal.SIGKILL)
            _, errors = process.communicate(timeout=60)
    assert process.returncode == 4, errors
    assert errors.count("error: ") == 1
    assert "is lost" in errors


def test_chat_takes_turns_over_a_stage(folder: Path) -> None:
    arguments = ["chat", str(folder), "--template", "alpaca", "--max-new-tokens", "4", "--temperature", "0"]
    with serving_stage(folder, 1) as stage:
        found = CliRunner().invoke(main, [*arguments, "--stage-at", f"1={stage.address}"], input="a\n/reset\na\n")
        usual = CliRunner().invoke(main, arguments, input="a\n/reset\na\n")
    assert found.exit_code == usual.exit_code == 0, found.output
    assert found.stdout == usual.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "problem"),
    [
        (["generate", "MODEL", "a", "--stage-at", "host"], 2, "`--stage-at host` is not an address"),
        (["generate", "MODEL", "a", "--stage-at", "9=127.0.0.1:1"], 2, "there is no stage `9`"),
        (["generate", "MODEL", "a", "--stage-at", "127.0.0.1:1"], 4, "is lost: Connection refused"),
        (["generate", "MODEL", "a", "--stage-at", "127.0.0.1:1", "--backend", "torch"], 2, "--backend torch"),
        (["generate", "MODEL/decode-1-of-2.onnx", "a", "--stage-at", "127.0.0.1:1"], 2, "needs a folder"),
        (["generate", "MODEL", "a", "--stage-timeout", "3"], 2, "needs `--stage-at`"),
        (["serve-stage", "MODEL", "--stage", "3"], 2, "has no stage 3"),
        (["serve-stage", "MODEL", "--stage", "1", "--listen", "7700"], 2, "is not an address"),
        (["serve-stage", "MODEL", "--stage", "1", "--listen", "192.0.2.1:0"], 4, "cannot listen on 192.0.2.1:0"),
        (["serve-stage", "MODEL/none", "--stage", "1"], 3, "is not a folder"),
    ],
)
def test_mistakes_are_refused_with_a_hint(folder: Path, arguments: list[str], code: int, problem: str) -> None:
    found = CliRunner().invoke(main, [text.replace("MODEL", str(folder)) for text in arguments])
    assert (found.exit_code, problem in found.stderr) == (code, True), found.stderr
    assert "hint: " in found.stderr
