"""A call that plans once for all shards of a process: what it does again, and when it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from llmconv.convert import to_hf
from llmconv.output import work, writer
from llmconv.output.work import Call, Finish, RepeatedCall, answer_to
from tests.builders.hf_models import LLAMA, save_model

SIZE = "8KB"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_model(tmp_path / "model", LLAMA, {})


@pytest.fixture
def names(model: Path, tmp_path: Path) -> list[str]:
    return [shard.name for shard in to_hf(model, tmp_path / "out", max_shard_size=SIZE, dry_run=True).shards]


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The fingerprint of every plan that is made."""
    made: list[str] = []
    original = writer._fingerprint

    def noted(*inputs: Any) -> str:
        made.append(original(*inputs))
        return made[-1]

    monkeypatch.setattr(writer, "_fingerprint", noted)
    return made


@pytest.fixture
def task(model: Path, tmp_path: Path) -> Iterator[Callable[..., dict[str, Any]]]:
    """The task of a shard and a run."""
    arguments = {"source": model, "output": tmp_path / "out", "max_shard_size": SIZE}
    fields = Call(("llmconv.convert.to_hugging_face", "to_hf"), arguments).fields()
    yield lambda name, run="1": {**fields, "shard": name, "run": run}
    for call in work._calls.values():
        call.end()
    work._calls.clear()


@pytest.mark.slow
def test_shards_of_a_run_share_a_plan(
    model: Path, names: list[str], plans: list[str], task: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    assert [answer_to(task(name)) for name in names] == [{}] * len(names)
    assert len(plans) == 1
    to_hf(model, tmp_path / "out", max_shard_size=SIZE, work=Finish())
    to_hf(model, tmp_path / "alone", max_shard_size=SIZE)
    assert (tmp_path / "out" / names[3]).read_bytes() == (tmp_path / "alone" / names[3]).read_bytes()


def test_another_run_plans_again(names: list[str], plans: list[str], task: Callable[..., dict[str, Any]]) -> None:
    first = [answer_to(task(names[0])), work._calls["1"]]
    assert answer_to(task(names[1], run="2")) == first[0] == {}
    assert len(plans) == 2 and isinstance(first[1], RepeatedCall) and not first[1].is_alive


def test_a_refusal_ends_the_call(model: Path, names: list[str], task: Callable[..., dict[str, Any]]) -> None:
    assert answer_to(task(names[0])) == {}
    for file in model.glob("*.safetensors"):
        file.unlink()
    assert answer_to(task(names[0], run="2"))["error"] == "InputRefused"
    assert not work._calls["2"].is_alive


def test_a_fault_is_raised_where_the_shard_is_asked_for(task: Callable[..., dict[str, Any]]) -> None:
    with pytest.raises(AttributeError, match="nothing"):
        answer_to(task("model.safetensors") | {"function": ["llmconv.convert.to_hugging_face", "nothing"]})


def test_shards_of_an_output_that_another_run_has_completed_count_as_written(
    model: Path, names: list[str], task: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    to_hf(model, tmp_path / "out", max_shard_size=SIZE)
    given = task(names[0])
    given["arguments"]["resume"] = True
    assert [answer_to(given), answer_to(given | {"shard": names[1]})] == [{}, {}]
