"""A hub on loopback, the environment that finds it, and a small model in several shards."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from llmconv.convert import to_hf
from tests.builders.fake_hub import FakeHub, serving

ROOT = Path(__file__).parents[2]
CHECKPOINT = ROOT / "examples/tiny-llama/ep4-ba2400-rank0.pt"
CANARY = "hf_canaryXq83vTnotherealone"
SHARDS = "100KB"


@dataclass
class Client:
    """A user of the hub.

    Attributes:
        hub: the server.
        home: of the user, with the caches.
        environment: of the commands.
    """

    hub: FakeHub
    home: Path
    environment: dict[str, str] = field(default_factory=dict)

    def start(self, *words: object) -> subprocess.Popen[str]:
        """Starts a command."""
        line = [sys.executable, "-m", "llmconv", *map(str, words)]
        return subprocess.Popen(
            line, env=self.environment, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def run(self, *words: object) -> subprocess.CompletedProcess[str]:
        """Runs a command; no output of any shows the token."""
        process = self.start(*words)
        out, err = process.communicate(timeout=120)
        assert CANARY not in out + err
        return subprocess.CompletedProcess([*map(str, words)], process.returncode, out, err)

    def cache(self) -> list[Path]:
        """The files of journals and shards that are kept on this machine."""
        return [path for path in (self.home / "cache/llmconv").rglob("*") if path.is_file()]


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    with serving(CANARY) as hub:
        home = tmp_path / "home"
        home.mkdir()
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
        named = {
            "HF_ENDPOINT": hub.address,
            "HF_HOME": str(home / "hf"),
            "HF_TOKEN": CANARY,
            "HF_HUB_DISABLE_XET": "1",
            "XDG_CACHE_HOME": str(home / "cache"),
            "NO_PROXY": "127.0.0.1",
        }
        yield Client(hub, home, kept | named)
        for file in [*home.rglob("*")]:
            assert not file.is_file() or CANARY.encode() not in file.read_bytes(), file


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of llmconv with several shards; do not write into it."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    to_hf(CHECKPOINT, folder, max_shard_size=SHARDS)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    """The bytes of all files of a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
