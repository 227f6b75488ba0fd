"""A model over stages in other processes gives what it gives in one; what goes wrong there ends in an error."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import struct
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from llmconv.errors import InputRefused, MalformedInput, StageFailed, UsageProblem
from llmconv.export.exporter import export
from llmconv.generation import Conversation, SharedPrefix, TextModel
from llmconv.runtime.onnxruntime.session_settings import StageAddresses
from llmconv.runtime.runner import Runner, default_positions
from llmconv.runtime.stages.connection import MAGIC, PREFIX, Address, Connection, Message, introduce
from llmconv.runtime.stages.stage_server import MAX_CLIENTS, StagedExport
from tests.builders.prefix_models import save_adapter
from tests.builders.stage_process import ALONE, ServedStage, serving_stage, serving_stages
from tests.builders.talking import save_letters
from tests.conftest import save_tiny
from tests.generation.test_graph_kinds import START, prompts, tokens_of
from tests.runtime.stages.conftest import Staged

pytestmark = pytest.mark.slow


def over(folder: Path, *stages: ServedStage, timeout: float = 20) -> TextModel:
    """The model with these stages in other processes."""
    return TextModel.open(folder, stages=StageAddresses([stage.address for stage in stages], timeout))


def logits_of(runner: Runner, steps: int = 6) -> list[Any]:
    """The last logits after a prompt of two rows, and after each of some steps."""
    ids, mask = np.array([[0, 5, 9, 70, 12], [3, 8, 11, 40, 6]]), np.ones((2, 5), np.int64)
    mask[0, 0] = 0
    step = runner.prefill(ids, mask, default_positions(mask, 5))
    found = [step.logits[:, -1]]
    for token in range(steps):
        mask = np.concatenate([mask, np.ones((2, 1), np.int64)], axis=1)
        step = runner.decode(np.full((2, 1), 20 + token), mask, default_positions(mask, 1), step.present)
        found.append(step.logits[:, -1])
    return found


@pytest.mark.one_row_in(3)
@pytest.mark.parametrize(
    ("kind", "count", "remote"),
    [
        ("llama", 2, (2,)),
        ("llama", 2, (1, 2)),
        ("gemma2", 3, (1, 3)),
        ("gemma2", 2, (1,)),
        ("llama", 3, (3, 1, 2)),
    ],
)
def test_logits_and_tokens_are_those_of_one_process(
    staged: Staged, kind: str, count: int, remote: tuple[int, ...]
) -> None:
    folder = staged(kind, count)
    usual = TextModel.open(folder)
    expected = tokens_of(usual, prompts())
    with serving_stages(folder, *remote) as stages:
        model = over(folder, *stages)
        for found, whole in zip(logits_of(model.runner), logits_of(usual.runner), strict=True):
            assert np.array_equal(found, whole)
        assert tokens_of(model, prompts()) == expected  # rows leave the batch
        assert tokens_of(model, prompts(), SharedPrefix(START)) == expected  # rows are repeated and moved
        assert tokens_of(model, prompts(), None, do_sample=True, seed=3) == tokens_of(
            usual, prompts(), None, do_sample=True, seed=3
        )
        assert tokens_of(model, prompts()[:2], num_beams=2) == tokens_of(usual, prompts()[:2], num_beams=2)
        conversation = Conversation()
        for ids in (START, [*START, 7, 8, 9], [*START, 7, 5]):  # tokens are taken back
            assert tokens_of(model, [ids], conversation) == tokens_of(usual, [ids])


KINDS: list[dict[str, Any]] = [
    {"postprocess": "topk:5"},
    {"precision": "bfloat16"},
    {"precision": "float16", "last_logits": True},
    {"quant": "int8", "unified": True, "prefill": False, "incremental": False},
]


@pytest.mark.one_row_in(4)
@pytest.mark.parametrize("options", KINDS)
def test_other_kinds_of_graphs_give_the_tokens_of_one_process(
    staged: Staged, tmp_path: Path, options: dict[str, Any]
) -> None:
    folder = tmp_path / "model"
    export(staged("llama", 2).parent / "source", folder, stages=2, **options)
    expected = tokens_of(TextModel.open(folder), prompts())
    with serving_stages(folder, 1, 2) as stages:
        assert tokens_of(over(folder, stages[0]), prompts()) == expected
        assert tokens_of(over(folder, stages[1]), prompts()) == expected


def test_a_tuned_prefix_works_over_stages(staged: Staged, tiny: Any, tmp_path: Path) -> None:
    adapter = save_adapter(tiny("llama"), tmp_path / "adapter", "PrefixTuning")
    folder = tmp_path / "model"
    export(staged("llama", 2).parent / "source", folder, stages=2, prefix=adapter)
    expected = tokens_of(TextModel.open(folder), prompts())
    with serving_stage(folder, 2) as stage:
        assert tokens_of(over(folder, stage), prompts()) == expected


@pytest.mark.parametrize("kind", ["llama", "gemma2"])  # gemma2 shares a matrix between the first and the last stage
def test_each_side_needs_only_its_own_files(staged: Staged, tmp_path: Path, kind: str) -> None:
    folder, part, client = staged(kind, 2), tmp_path / "part", tmp_path / "client"
    first, second = (files_of(folder, number) for number in (1, 2))
    assert bool(first & second) == (kind == "gemma2")
    part.mkdir()
    for name in {"llmconv.json", *second}:
        shutil.copy(folder / name, part)
    shutil.copytree(folder, client, ignore=shutil.ignore_patterns(*(second - first)))
    with serving_stage(part, 2) as stage:
        assert tokens_of(over(client, stage), prompts()) == tokens_of(TextModel.open(folder), prompts())
    with pytest.raises(StageFailed, match="is lost: Connection refused"):
        over(client, stage)
    with pytest.raises(MalformedInput, match="missing"):
        TextModel.open(client)


def files_of(folder: Path, number: int) -> set[str]:
    """The files that a stage needs, by llmconv.json."""
    graphs = json.loads((folder / "llmconv.json").read_text())["graphs"].values()
    stages = [graph["stages"][number - 1] for graph in graphs]
    return {name for stage in stages for name in (stage["file"], *stage["weights"])}


@pytest.mark.parametrize(("kind", "size"), [("llama", "5GB"), ("gemma2", "100KB")])
def test_a_folder_of_stages_is_a_model_of_transformers(staged: Staged, tmp_path: Path, kind: str, size: str) -> None:
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - takes seconds

    source, folder = staged(kind, 2).parent / "source", tmp_path / "model"
    export(source, folder, stages=3, max_shard_size=size)
    one, two = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (source, folder))
    assert one.keys() == two.keys()
    assert all(bool((one[name] == two[name]).all()) for name in one)
    shared = set.intersection(*(files_of(folder, number) for number in (1, 2, 3)))
    assert not shared


def test_two_clients_have_caches_of_their_own_which_are_freed_when_they_leave(staged: Staged) -> None:
    folder = staged("llama", 2)
    expected = [tokens_of(TextModel.open(folder), [ids]) for ids in prompts()[:2]]
    with serving_stage(folder, 2) as stage:
        models = [over(folder, stage) for _ in range(2)]
        streams = [
            model.stream([ids], model.defaults.but(max_new_tokens=24, eos_token_id=(15, 10, 64, 2)))
            for model, ids in zip(models, prompts(), strict=False)
        ]
        found: list[list[Any]] = [[], []]
        while len(found[0]) + len(found[1]) < sum(len(one[0]) for one in expected):  # in turn
            for texts, stream in zip(found, streams, strict=True):
                texts += [piece.token for piece in [next(stream, None)] if piece]
        assert found == [one[0] for one in expected]
        for model in models:
            model.runner.close()  # type: ignore[attr-defined]
        freed = stage.wait_for("disconnected (it left)")
        assert int(freed.split()[-3]) <= 4  # not one per token


def test_a_killed_stage_ends_the_text_with_one_error_and_a_new_one_continues(staged: Staged) -> None:
    folder = staged("llama", 2)
    usual, conversation = TextModel.open(folder), Conversation()
    with serving_stage(folder, 2) as stage:
        model = over(folder, stage)
        assert tokens_of(model, [START], conversation) == tokens_of(usual, [START])
        pieces = model.stream([START], model.defaults.but(max_new_tokens=30, eos_token_id=()))
        next(pieces)
        stage.process.send_signal(signal.SIGKILL)
        stage.process.wait()
        with pytest.raises(StageFailed, match=r"stage 2 at 127.0.0.1:\d+ is lost") as caught:
            list(pieces)
        assert "start it again" in caught.value.hint
    with serving_stage(folder, 2, "--listen", stage.address):
        ids = [*START, 7, 8]
        assert tokens_of(model, [ids], conversation) == tokens_of(usual, [ids])  # whose cache was lost


def test_an_interrupted_answer_leaves_nothing_behind(staged: Staged) -> None:
    folder = staged("llama", 2)
    usual, conversation = TextModel.open(folder), Conversation()
    with serving_stage(folder, 2) as stage:
        model = over(folder, stage)
        assert tokens_of(model, [START], conversation) == tokens_of(usual, [START])
        stage.process.send_signal(signal.SIGSTOP)
        before = signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises(KeyboardInterrupt):  # Ctrl-C in a chat
            tokens_of(model, [[*START, 5]], conversation)
        signal.signal(signal.SIGALRM, before)
        stage.process.send_signal(signal.SIGCONT)
        assert tokens_of(model, [[*START, 7]], conversation) == tokens_of(usual, [[*START, 7]])


def test_a_silent_stage_is_lost_after_the_timeout(staged: Staged) -> None:
    folder = staged("llama", 2)
    with serving_stage(folder, 2) as stage:
        model = over(folder, stage, timeout=1)
        stage.process.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(StageFailed, match="no answer for 1 s"):
            tokens_of(model, [START])
        assert time.monotonic() - began < 5
        stage.process.send_signal(signal.SIGCONT)
        assert tokens_of(model, [START]) == tokens_of(TextModel.open(folder), [START])


def test_a_stage_that_computes_for_long_is_not_lost(tmp_path: Path) -> None:
    wide = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 2}
    source = save_letters(save_tiny("llama", tmp_path / "source", **wide))
    export(source, tmp_path / "model", stages=2)
    ids = np.random.default_rng(0).integers(3, 96, (16, 120))
    mask = np.ones_like(ids)
    with serving_stage(tmp_path / "model", 2, *ALONE, "--threads", "1") as stage:
        runner = over(tmp_path / "model", stage, timeout=0.4).runner
        began = time.monotonic()
        assert runner.prefill(ids, mask, default_positions(mask, 120)).logits.shape == (16, 1, 96)
        assert time.monotonic() - began > 0.4


def test_stages_of_another_model_or_export_are_refused(staged: Staged, tmp_path: Path) -> None:
    folder = staged("llama", 2)
    tuned = tmp_path / "tuned"
    shutil.copytree(folder.parent / "source", tmp_path / "source")
    weights = load_file(tmp_path / "source" / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] + 1
    save_file(weights, tmp_path / "source" / "model.safetensors", {"format": "pt"})
    export(tmp_path / "source", tuned, stages=2)
    with serving_stage(folder, 2) as stage:
        for other in (tuned, staged("llama", 3), staged("gemma2", 2)):
            with pytest.raises(StageFailed, match="of another model or export") as caught:
                over(other, stage)
            assert "copy llmconv.json" in caught.value.hint
        with pytest.raises(UsageProblem, match="that is stage 2"):
            TextModel.open(folder, stages=StageAddresses([f"1={stage.address}"]))
        with pytest.raises(UsageProblem, match="two addresses have stage 2"):
            over(folder, stage, stage)
        with pytest.raises(UsageProblem, match="there is no stage `3`"):
            TextModel.open(folder, stages=StageAddresses([f"3={stage.address}"]))
        assert tokens_of(over(folder, stage), [START]) == tokens_of(TextModel.open(folder), [START])


def test_folders_without_the_stage_are_refused(staged: Staged, talking: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(staged("llama", 2), folder)
    with pytest.raises(InputRefused, match="has no graphs in stages"):
        StagedExport.read(talking)
    with pytest.raises(UsageProblem, match="has no stage 3"):
        StagedExport.read(folder).require(3)
    graph = folder / "decode-2-of-2.onnx"
    graph.write_bytes(graph.read_bytes() + b"\x00")
    with pytest.raises(MalformedInput, match="is not the graph that"):
        StagedExport.read(folder).require(2)
    graph.unlink()
    with pytest.raises(MalformedInput, match="is missing"):
        StagedExport.read(folder).require(2)


def test_the_token_is_asked_for_and_never_sent(staged: Staged, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = staged("llama", 2)
    with serving_stage(folder, 2, LLMCONV_STAGE_TOKEN="correct horse") as stage:
        for wrong in ("", "battery", "correct hors\u00e9"):
            monkeypatch.setenv("LLMCONV_STAGE_TOKEN", wrong)
            with pytest.raises(StageFailed, match="the token is not that of the stage"):
                over(folder, stage)
        monkeypatch.setenv("LLMCONV_STAGE_TOKEN", "correct horse")
        assert len(tokens_of(over(folder, stage), [START])[0]) > 1
        assert not [line for line in stage.log if "horse" in line]


def connected(stage: ServedStage, folder: Path) -> Connection:
    """A client of a stage by hand."""
    address = Address.parse(stage.address, "")
    connection = Connection(socket.create_connection((address.host, address.port)), 10)
    introduce(connection, StagedExport.read(folder).fingerprints, 10)
    return connection


def inputs(**changes: Any) -> dict[str, Any]:
    """What stage 2 of the tiny Llama takes."""
    ones = np.ones((1, 1), np.int64)
    hidden = np.ones((1, 1, 64), np.float32)
    return {"attention_mask": ones, "position_ids": ones, "hidden_states.2": hidden, **changes}


def test_strangers_that_drip_take_the_place_of_no_client(one_stage: tuple[ServedStage, Path]) -> None:
    address = Address.parse(one_stage[0].address, "")
    strangers = [socket.create_connection((address.host, address.port)) for _ in range(MAX_CLIENTS + 20)]
    try:
        for stranger in strangers:
            stranger.sendall(PREFIX.pack(MAGIC, 100_000, 0) + b"{")
        connected(*one_stage).close()
    finally:
        for stranger in strangers:
            stranger.close()


def test_a_client_too_many_is_told_so(staged: Staged) -> None:
    folder = staged("llama", 2)
    with serving_stage(folder, 2) as stage:
        clients = [connected(stage, folder) for _ in range(MAX_CLIENTS)]
        with pytest.raises(StageFailed, match="the stage has 64 clients"):
            over(folder, stage)
        clients.pop().close()
        stage.wait_for("disconnected (it left)")
        connected(stage, folder).close()
        for client in clients:
            client.close()


def test_the_time_limit_of_a_message_is_that_of_all_its_bytes() -> None:
    ours, theirs = _pair()
    done = threading.Event()

    def drip() -> None:
        with suppress(OSError):
            theirs.sendall(PREFIX.pack(MAGIC, 100_000, 0))
            while not done.wait(0.02):
                theirs.sendall(b" ")

    thread = threading.Thread(target=drip)
    thread.start()
    connection = Connection(ours, 10)
    try:
        with pytest.raises(TimeoutError):
            connection.receive(within=0.3)
    finally:
        done.set()
        thread.join()
        connection.close()
        theirs.close()


def _pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        other = socket.create_connection(listener.getsockname())
        return listener.accept()[0], other


RUN: dict[str, Any] = {"use": "decode", "past": 0, "edits": [], "free": []}
HIDDEN = "hidden_states.2"


@pytest.mark.parametrize(
    ("kind", "fields", "tensors"),
    [
        ("run", {}, inputs()),
        ("stop", RUN, inputs()),
        ("run", {**RUN, "use": "other"}, inputs()),
        ("run", {**RUN, "past": 7}, inputs()),
        ("run", {**RUN, "past": True}, inputs()),
        ("run", {**RUN, "free": [-1]}, inputs()),
        ("run", {**RUN, "free": 1}, inputs()),
        ("run", {**RUN, "past": 1, "edits": [["rows", [1], 0]]}, inputs()),
        ("run", {**RUN, "past": 1, "edits": [["cut", [2], 0]]}, inputs()),
        ("run", {**RUN, "past": 1, "edits": [["cut", [1, 1], 0]]}, inputs()),
        ("run", {**RUN, "past": 1, "edits": [["drop", [1], 0]]}, inputs()),
        ("run", {**RUN, "past": 1, "edits": [[[], [1], 0]]}, inputs()),
        ("run", {**RUN, "past": 1, "edits": [["moved", [1], 9]]}, inputs()),
        ("run", {**RUN, "past": 1, "edits": [["rows", [0], 0]] * 65}, inputs()),
        ("run", RUN, {}),
        ("run", RUN, inputs(more=np.ones(1, np.int64))),
        ("run", RUN, inputs(**{HIDDEN: np.ones((1, 1, 64), np.float64)})),
        ("run", RUN, inputs(**{HIDDEN: np.ones((1, 1, 65), np.float32)})),
        ("run", RUN, inputs(**{HIDDEN: np.ones((1, 64), np.float32)})),
        ("run", RUN, inputs(**{HIDDEN: np.ones((2, 1, 64), np.float32)})),
        ("run", RUN, inputs(**{HIDDEN: np.ones((0, 1, 64), np.float32)})),
        ("run", RUN, inputs(attention_mask=np.ones((1, 1), np.int32))),
    ],
)
def test_invalid_requests_end_the_connection_only(
    one_stage: tuple[ServedStage, Path], kind: str, fields: Any, tensors: Any
) -> None:
    connection = connected(*one_stage)
    connection.send(Message("run", RUN, inputs()))
    assert connection.receive().number("cache") == 1
    connection.send(Message(kind, fields, tensors))
    assert connection.receive().kind == "refused"
    with pytest.raises((EOFError, ConnectionError)):
        connection.receive()
    connection.close()


@pytest.fixture(scope="module")
def one_stage(staged: Staged) -> Any:
    """The second of two stages, served for the tests that leave it running."""
    with serving_stage(staged("llama", 2), 2) as stage:
        yield stage, staged("llama", 2)


def test_a_request_that_cannot_be_run_leaves_the_connection_open(one_stage: tuple[ServedStage, Path]) -> None:
    connection = connected(*one_stage)
    connection.send(Message("run", RUN, inputs(position_ids=np.ones((1, 3), np.int64))))
    assert connection.receive().kind == "failed"
    connection.send(Message("run", RUN, inputs()))
    assert connection.receive().kind == "result"
    connection.close()


@pytest.mark.parametrize(
    "content",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00" * 20,
        os.urandom(5000),
        PREFIX.pack(MAGIC, 2**32 - 1, 2**63),
        PREFIX.pack(MAGIC, 20, 0) + b"{",
        b"".join(Message("run", RUN, {}).encode()),
        b"".join(Message("hello", {"proof": "\ud800", "fingerprints": [], "silence": -1}, {}).encode()),
        b"".join(Message("hello", {"proof": "", "fingerprints": [1], "silence": 1}, {"x": np.ones(9)}).encode()),
    ],
)
def test_garbage_on_the_port_does_not_stop_the_stage(one_stage: tuple[ServedStage, Path], content: bytes) -> None:
    stage, folder = one_stage
    address = Address.parse(stage.address, "")
    with socket.create_connection((address.host, address.port), timeout=10) as noisy:
        noisy.sendall(content)
        noisy.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
    connected(stage, folder).close()
    assert stage.process.poll() is None
    assert not [line for line in stage.log if "Traceback" in line]


@pytest.mark.parametrize(
    "content", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH-2.0-x\r\n" * 9, b"", PREFIX.pack(MAGIC, 9, 9)]
)
def test_what_is_not_a_stage_is_refused_in_time(staged: Staged, content: bytes) -> None:
    folder, done = staged("llama", 2), threading.Event()

    def answer() -> None:
        accepted, _ = other.accept()
        with accepted, suppress(OSError):
            accepted.sendall(content)
            done.wait(30)

    with socket.create_server(("127.0.0.1", 0)) as other:
        answering = threading.Thread(target=answer)
        answering.start()
        began = time.monotonic()
        with pytest.raises(StageFailed, match="is lost"):
            TextModel.open(folder, stages=StageAddresses([f"127.0.0.1:{other.getsockname()[1]}"], 1))
        assert time.monotonic() - began < 10
        done.set()
        answering.join()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_a_stage(staged: Staged, number: int) -> None:
    with serving_stage(staged("llama", 2), 1) as stage:
        connected(stage, staged("llama", 2))
        stage.process.send_signal(number)
        assert stage.process.wait(10) == 0


@pytest.mark.parametrize("text", ["7700", "host", "host:", "host:x", "host:70000", "::1:7700", ":7700", "[::1]", ""])
def test_what_is_not_an_address_is_refused(text: str) -> None:
    with pytest.raises(UsageProblem, match="is not an address"):
        Address.parse(text, "--listen")
    assert str(Address.parse("[::1]:7700", "--listen")) == "[::1]:7700"
