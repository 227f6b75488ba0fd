"""Cached tokens do not run again, and the cache changes no token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmconv.export.exporter import export
from llmconv.generation import Conversation, SharedPrefix, TextModel, generate
from llmconv.runtime.runner import Step
from tests.builders.talking import save_letters
from tests.conftest import save_tiny

BACKENDS = pytest.mark.parametrize("backend", ["onnx", "torch"])


class Counting:
    """A runner that records the number of columns of every prefill."""

    def __init__(self, runner: Any) -> None:
        self._runner, self.columns = runner, list[int]()

    def prefill(self, input_ids: Any, *rest: Any, last_only: bool = False) -> Step:
        """See `Runner`."""
        self.columns.append(input_ids.shape[1])
        step: Step = self._runner.prefill(input_ids, *rest)
        return step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


def counting(folder: Path, backend: str) -> TextModel:
    """The model with a counting runner."""
    model = TextModel.open(folder, backend=backend, form="file")  # which continues several rows at once
    return TextModel(model.tokenizer, Counting(model.runner), model.defaults, model.context_length, backend)


def columns(model: TextModel) -> list[int]:
    """The columns that its runner has counted."""
    assert isinstance(model.runner, Counting)
    return model.runner.columns


def tokens_of(model: TextModel, prompts: list[list[int]], cache: Any = None, most: int = 0) -> list[list[int]]:
    """Seven new tokens per prompt."""
    found: list[list[int]] = [[] for _ in prompts]
    for piece in model.stream(prompts, model.defaults.but(max_new_tokens=7, eos_token_id=()), cache, most):
        found[piece.index] += [piece.token] if piece.token is not None else []
    return found


@pytest.mark.slow
@BACKENDS
def test_a_prompt_that_runs_in_pieces_gives_the_same_tokens(talking: Path, backend: str) -> None:
    model = counting(talking, backend)
    prompts = [[20, 30, 40, 50, 60, 21, 31], [41, 51], [22, 32, 42, 52]]
    whole = tokens_of(model, prompts)
    assert tokens_of(model, prompts, most=3) == whole
    assert columns(model) == [7, 3, 3, 1]


@pytest.mark.quick_rows("torch")
@BACKENDS
def test_a_prompt_that_stopped_half_way_is_continued(talking: Path, backend: str) -> None:
    model, conversation = counting(talking, backend), Conversation()
    prompt = [20, 30, 40, 50, 60, 21, 31]
    pieces = model.stream([prompt], None, conversation, 3)
    assert next(pieces).token is None
    pieces.close()
    assert conversation.ids == prompt[:3]
    assert tokens_of(model, [prompt], conversation) == tokens_of(model, [prompt])
    assert columns(model) == [3, 4, 7]


@pytest.mark.slow
@BACKENDS
def test_the_next_turn_runs_only_new_tokens(talking: Path, backend: str) -> None:
    model, conversation = counting(talking, backend), Conversation()
    first = [20, 30, 40, 50, 60]
    turn = [*first, *tokens_of(model, [first], conversation)[0], 33, 44]
    assert tokens_of(model, [turn], conversation) == tokens_of(model, [turn])
    assert columns(model) == [5, 3, len(turn)]


@pytest.mark.slow
@BACKENDS
def test_a_changed_conversation_runs_from_the_first_difference(talking: Path, backend: str) -> None:
    model, conversation = counting(talking, backend), Conversation()
    tokens_of(model, [[20, 30, 40, 50, 60]], conversation)
    other = [20, 30, 40, 51, 61, 71]
    assert tokens_of(model, [other], conversation) == tokens_of(model, [other])
    assert columns(model) == [5, 3, 6]


@pytest.mark.quick_rows("torch")
@BACKENDS
def test_an_abandoned_stream_leaves_a_conversation_that_continues(talking: Path, backend: str) -> None:
    model, conversation = counting(talking, backend), Conversation()
    stream = model.stream([[20, 30, 40]], model.defaults.but(max_new_tokens=9, eos_token_id=()), conversation)
    tokens = [next(stream).token, next(stream).token]
    stream.close()
    turn = [20, 30, 40, *[token for token in tokens if token is not None], 77]
    assert tokens_of(model, [turn], conversation) == tokens_of(model, [turn])


@pytest.mark.quick_rows("llama-onnx")
@BACKENDS
@pytest.mark.parametrize("family", ["llama", pytest.param("gemma2", marks=pytest.mark.slow)])
def test_a_shared_prefix_is_run_once_and_changes_nothing(
    talking_as: Callable[[str], Path], family: str, backend: str
) -> None:
    model = counting(talking_as(family), backend)
    rng = np.random.default_rng(3)
    start = rng.integers(3, 96, size=9).tolist()
    prompts = [[*start, *rng.integers(3, 96, size=size).tolist()] for size in (1, 4, 15)]
    shared = SharedPrefix(start)
    assert tokens_of(model, prompts, shared) == tokens_of(model, prompts)
    assert tokens_of(model, prompts[:1], shared) == tokens_of(model, prompts[:1])
    assert columns(model) == [9, 15, 24, 1, 10]


@pytest.mark.slow
def test_a_prefix_of_generate_is_part_of_the_prompts(talking: Path) -> None:
    found = generate(talking, ["ab", "c"], max_new_tokens=6, prompt_prefix="Once upon ")
    whole = generate(talking, ["Once upon ab", "Once upon c"], max_new_tokens=6)
    assert [one.text for one in found.completions] == [one.text for one in whole.completions]


@pytest.mark.slow
def test_a_model_with_states_shares_a_prefix_and_continues(tmp_path: Path) -> None:
    changes = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 4, "state_size": 8, "eos_token_id": 2}
    folder = save_letters(save_tiny("mamba", tmp_path / "mamba", **changes))
    export(folder, prefill=True, incremental=True)
    for backend in ("onnx", "torch"):
        model, conversation = TextModel.open(folder, backend=backend), Conversation()
        first = [20, 30, 40]
        turn = [*first, *tokens_of(model, [first], conversation)[0], 33, 44]
        assert tokens_of(model, [turn], conversation) == tokens_of(model, [turn])
        prompts = [[*first, 5, 6], [*first, 7, 8]]
        assert tokens_of(model, prompts, SharedPrefix(first)) == tokens_of(model, prompts)
