"""Stages in two network namespaces, with the delay and the losses of a real network between them."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmconv.errors import StageFailed
from llmconv.generation import TextModel
from llmconv.runtime.onnxruntime.session_settings import StageAddresses
from tests.builders.slow_relay import slow_relay
from tests.builders.stage_process import serving_stage
from tests.generation.test_graph_kinds import START, prompts, tokens_of
from tests.runtime.stages.conftest import Staged

pytestmark = pytest.mark.slow

NAME = f"llmconv{os.getpid()}"
NEAR, FAR = "10.213.7.1", "10.213.7.2"
DELAY = 0.02


def ip(*arguments: str) -> None:
    """Runs `ip`."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)


def netem(*arguments: str) -> None:
    """Changes the far end of the network, see tc-netem(8); skips the test where the kernel cannot."""
    command = ["ip", "netns", "exec", NAME, "tc", "qdisc", "replace", "dev", "far", "root", "netem", *arguments]
    done = subprocess.run(command, check=False, capture_output=True, timeout=20, text=True)
    if done.returncode:
        pytest.skip(f"needs netem: {done.stderr.strip()[:100]}")


@pytest.fixture
def network() -> Iterator[list[str]]:
    """What runs a command on the far side of a network."""
    if not (shutil.which("ip") and shutil.which("tc")):
        pytest.skip("needs `ip` and `tc` (iproute2)")
    try:
        ip("netns", "add", NAME)
        ip("link", "add", f"n{os.getpid()}", "type", "veth", "peer", "name", "far", "netns", NAME)
        ip("addr", "add", f"{NEAR}/30", "dev", f"n{os.getpid()}")
        ip("link", "set", f"n{os.getpid()}", "up")
        ip("-n", NAME, "addr", "add", f"{FAR}/30", "dev", "far")
        ip("-n", NAME, "link", "set", "far", "up")
    except subprocess.CalledProcessError as error:
        remove()
        pytest.skip(f"needs network namespaces: {error.stderr.decode()[:100]}")
    yield ["ip", "netns", "exec", NAME]
    remove()


def remove() -> None:
    """Removes the link and the namespace, as far as they exist."""
    for command in (["link", "del", f"n{os.getpid()}"], ["netns", "del", NAME]):
        subprocess.run(["ip", *command], capture_output=True, check=False, timeout=20)


def over(folder: Path, address: str, timeout: float) -> TextModel:
    """The model with a stage on the far side."""
    return TextModel.open(folder, stages=StageAddresses([address], timeout))


def test_a_slow_network_that_loses_packets_changes_no_token(staged: Staged, network: list[str]) -> None:
    netem("delay", f"{DELAY * 1000:g}ms")
    folder = staged("llama", 2)
    expected = tokens_of(TextModel.open(folder), prompts())
    with serving_stage(folder, 2, "--listen", f"{FAR}:0", before=network) as stage:
        model = over(folder, stage.address, 5)
        began = time.monotonic()
        assert tokens_of(model, prompts()) == expected
        assert time.monotonic() - began > DELAY * max(map(len, expected))  # one way per token
        netem("delay", "5ms", "loss", "10%")
        assert tokens_of(model, prompts()) == expected


def test_a_distant_stage_costs_time_and_changes_no_token(staged: Staged, network: list[str]) -> None:
    folder = staged("llama", 2)
    expected = tokens_of(TextModel.open(folder), prompts())
    with (
        serving_stage(folder, 2, "--listen", f"{FAR}:0", before=network) as stage,
        slow_relay(stage.address, DELAY) as address,
    ):
        model = over(folder, address, 5)
        began = time.monotonic()
        assert tokens_of(model, prompts()) == expected
        assert time.monotonic() - began > 2 * DELAY * max(map(len, expected))  # there and back per token


def test_a_cut_network_ends_the_text_in_time(staged: Staged, network: list[str]) -> None:
    folder = staged("llama", 2)
    expected = tokens_of(TextModel.open(folder), prompts())
    with serving_stage(folder, 2, "--listen", f"{FAR}:0", before=network) as stage:
        model = over(folder, stage.address, 2)
        assert tokens_of(model, prompts()) == expected
        pieces = model.stream([START], model.defaults.but(max_new_tokens=40, eos_token_id=()))
        next(pieces)
        ip("-n", NAME, "link", "set", "far", "down")
        began = time.monotonic()
        with pytest.raises(StageFailed, match="is lost"):
            list(pieces)
        assert time.monotonic() - began < 6
        ip("-n", NAME, "link", "set", "far", "up")
        assert tokens_of(model, prompts()) == expected
