"""Streams that share the steps of a model give the tokens that they give alone, whenever they start and end."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmconv.errors import UsageProblem
from llmconv.export.exporter import export
from llmconv.generation import Conversation, TextModel
from llmconv.generation.row import TextPiece
from llmconv.generation.shared_batch import SharedBatch
from llmconv.runtime.onnxruntime.joined_cache import CopiedCache, JoinedCache, SlotCache
from llmconv.runtime.runner import ArrayCache
from tests.builders.talking import save_letters
from tests.conftest import save_tiny
from tools.tiny_models import depth
from tools.tiny_models import save_tiny as save_any


@dataclass(frozen=True)
class Request:
    """A prompt, the number of new tokens, the round in which it comes, and that after which its client leaves."""

    prompt: list[int]
    new: int
    comes: int
    samples: bool = False
    leaves: int | None = None


def requests(count: int, seed: int, rounds: int = 30) -> list[Request]:
    random = np.random.default_rng(seed)
    return [
        Request(
            random.integers(3, 96, size=random.integers(1, 60)).tolist(),
            int(random.integers(1, 40)),
            int(random.integers(0, rounds)),
            samples=bool(random.random() < 0.3),
        )
        for _ in range(count)
    ]


def stream(
    model: TextModel, request: Request, number: int, kept: Conversation | None, others: SharedBatch | None
) -> Generator[TextPiece]:
    chosen: dict[str, Any] = {
        "do_sample": request.samples,
        "seed": number,
        "eos_token_id": (),
        "max_new_tokens": request.new,
    }
    return model.stream([request.prompt], model.defaults.but(**chosen), kept, 16, others=others)


def alone(model: TextModel, every: Sequence[Request]) -> list[list[int | None]]:
    return [
        [piece.token for piece in stream(model, one, number, None, None) if piece.token is not None]
        for number, one in enumerate(every)
    ]


def together(
    model: TextModel, every: Sequence[Request], kept: Sequence[Conversation] = ()
) -> tuple[list[list[int | None]], list[int]]:
    """The tokens of each request, a step of each in turn, and the number of rows of each shared step."""
    others, rows = Counting(model.runner, model.positions), list[int]()
    others.rows = rows
    found = [list[int | None]() for _ in every]
    waiting = sorted(range(len(every)), key=lambda number: every[number].comes)
    going, now = list[tuple[int, Generator[TextPiece]]](), 0
    while waiting or going:
        while waiting and every[waiting[0]].comes <= now:
            number = waiting.pop(0)
            going.append((number, stream(model, every[number], number, kept[number] if kept else None, others)))
        for number, pieces in list(going):
            leaves = every[number].leaves
            piece = None if leaves is not None and now >= leaves else next(pieces, None)
            if piece is None:
                pieces.close()
                going.remove((number, pieces))
            elif piece.token is not None:
                found[number].append(piece.token)
        now += 1
    assert not others.members
    return found, rows


class Counting(SharedBatch):
    """Notes the number of rows of each step."""

    rows: list[int]

    @property
    def members(self) -> int:
        return len(self._members) + len(self._joined)

    def _step(self) -> None:
        self.rows.append(len(self._joined))
        super()._step()


FAMILIES = ["llama", "gemma2", "bloom", "mixtral", "deepseek_v3", "gemma3n_text", "lfm2", "mamba2", "qwen3_next"]


@pytest.mark.one_row_in(3)
@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_streams_give_the_same_tokens_as_alone(tmp_path: Path, family: str) -> None:
    folder = tmp_path / family
    save_any(family, folder, depth(family))
    export(folder, prefill=True, incremental=True)
    model = TextModel.open(save_letters(folder))
    every = requests(12, seed=len(family))
    found, rows = together(model, every)
    assert found == alone(model, every)
    assert max(rows) > 3


@pytest.mark.quick_rows("auto", "file")
@pytest.mark.parametrize("form", ["auto", "file", "torch", "shared-buffer", "ort-cpu", "int8 cache"])
def test_every_form_of_a_model_shares_steps(talking: Path, tmp_path: Path, form: str) -> None:
    options: dict[str, dict[str, Any]] = {
        "shared-buffer": {"cache": "shared-buffer"},
        "ort-cpu": {"target": "ort-cpu"},
        "int8 cache": {"cache": "shared-buffer", "target": "ort-cpu", "kv_cache": "int8"},
    }
    folder = talking
    if form in options:
        folder = save_letters(save_tiny("llama", tmp_path / "model"))
        export(folder, **options[form])
    given: dict[str, Any] = {"backend": "torch"} if form == "torch" else {"form": "file" if form != "auto" else "auto"}
    model = TextModel.open(folder, **given)
    every = requests(30, seed=3, rounds=60)
    found, rows = together(model, every)
    assert found == alone(model, every)
    assert max(rows) > 4


def test_a_client_that_leaves_changes_no_other_text(talking: Path) -> None:
    model = TextModel.open(talking)
    every = [
        replace(one, leaves=one.comes + 9 if number % 3 == 0 else None)
        for number, one in enumerate(requests(18, seed=5))
    ]
    found, _ = together(model, every)
    for one, tokens, expected in zip(every, found, alone(model, every), strict=True):
        assert tokens == (expected if one.leaves is None else expected[: len(tokens)])
        assert one.leaves is None or len(tokens) < 10


def test_a_conversation_goes_on_after_shared_steps(talking: Path) -> None:
    model = TextModel.open(talking)
    every = requests(9, seed=8)
    kept = [Conversation() for _ in every]
    found, _ = together(model, every, kept)
    for one, tokens, conversation in zip(every, found, kept, strict=True):
        assert conversation.ids == [*one.prompt, *tokens][:-1]
        second = replace(one, prompt=[*conversation.ids, 40, 41], samples=False)
        assert conversation.past([second.prompt], model.runner)
        (expected,) = alone(model, [second])
        assert [p.token for p in stream(model, second, 0, conversation, None) if p.token is not None] == expected


def test_an_error_of_one_row_ends_that_row_alone(talking: Path, tmp_path: Path) -> None:
    folder = save_letters(save_tiny("llama", tmp_path / "model"))
    export(folder, postprocess="topk:5")
    model = TextModel.open(folder)
    good = model.defaults.but(max_new_tokens=12, eos_token_id=())
    bad = good.but(do_sample=True, top_k=50)
    expected = [piece.token for piece in model.stream([[20, 30]], good)]
    others = model.shared_batch()
    first, second = (model.stream([[20, 30]], good, others=others) for _ in range(2))
    found = [next(first).token]
    next(second)
    third = model.stream([[40]], bad, others=others)
    with pytest.raises(UsageProblem, match="likeliest tokens alone"):
        list(third)
    while (piece := next(first, None)) is not None:
        found.append(piece.token)
        next(second, None)
    assert found == expected


@pytest.mark.slow
def test_rows_whose_activations_share_a_scale_run_by_themselves(tmp_path: Path) -> None:
    folder = save_letters(save_tiny("llama", tmp_path / "model", hidden_size=64, intermediate_size=64))
    export(folder, tmp_path / "out", quant="a8w8")
    model = TextModel.open(tmp_path / "out")
    every = [replace(one, comes=0) for one in requests(4, seed=1)]
    found, rows = together(model, every)
    assert found == alone(model, every) and not rows


def of_numbers(tokens: int, start: int) -> ArrayCache:
    """A cache of one row whose keys are numbers that count tokens, and a state."""
    keys = np.arange(start, start + tokens, dtype=np.float32).reshape(1, 1, tokens, 1)
    return ArrayCache({"present.0.key": np.repeat(keys, 2, axis=1), "present.0.value": -keys}, tokens)


@pytest.mark.parametrize("kind", [SlotCache, CopiedCache])
def test_rows_of_any_length_join_and_leave(kind: Callable[[], JoinedCache]) -> None:
    random, joined, held = np.random.default_rng(0), kind(), list[ArrayCache]()
    for number in range(300):
        if held and random.random() < 0.5:
            at = int(random.integers(len(held)))
            taken, expected = joined.take(at), held[at]
            held[at] = held[-1]
            held.pop()
            for name, array in taken.arrays().items():
                np.testing.assert_array_equal(array, expected.arrays()[name])
            assert taken.length == expected.length
        else:
            held.append(of_numbers(int(random.integers(1, 150)), 1000 * number))
            joined.add(held[-1])
        if held:  # a step that writes a token into each row
            past = joined.past().arrays()
            assert past["present.0.key"].shape[:1] == (len(held),)
            mask = joined.mask()
            assert mask.shape == (len(held), joined.columns + 1)
            for row, cache in enumerate(held):
                seen = past["present.0.key"][row, 0, mask[row, :-1] == 1, 0]
                np.testing.assert_array_equal(seen, cache.arrays()["present.0.key"][0, 0, :, 0])
