"""Guessed tokens change neither tokens nor text, whatever the guesses; and what they save is counted."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from llmconv.cli import main
from llmconv.errors import UsageProblem
from llmconv.export.exporter import export
from llmconv.generation import Conversation, TextModel, generate, loop
from llmconv.generation import model as text_model
from llmconv.generation.draft import Draft, shared_vocabulary
from llmconv.generation.loop import MOST, Lookup, longest_match
from llmconv.generation.row import TextPiece, is_close
from llmconv.runtime.onnxruntime.shared_buffers import BufferCache
from llmconv.runtime.runner import default_positions, taken_back
from llmconv.tensors import Array
from tests.builders.slow_rows import slow_but
from tests.builders.talking import save_letters
from tools.tiny_models import depth, save_tiny

PROMPT = [20, 30, 40, 50, 60, 21, 31, 41]
NEW = 40


class Partly(Lookup):
    """Guesses tokens that are known to come, in half of the guesses one of them wrong."""

    def __init__(self, coming: list[int], seed: int) -> None:
        super().__init__()
        self._coming, self._random = coming, np.random.default_rng(seed)

    def guess(self, ids: Array, most: int) -> Array:
        count = int(self._random.integers(0, min(most, 9) + 1)) if most else 0
        guess = np.array(self._coming[len(ids) :][:count], np.int64)
        if len(guess) and self._random.random() < 0.5:
            guess[self._random.integers(len(guess))] = self._random.integers(3, 96)
        return guess


def pieces(
    model: TextModel, prompt: list[int], conversation: Conversation | None = None, **fields: Any
) -> list[TextPiece]:
    """Those of the new tokens, empty ones left out."""
    settings = model.defaults.but(**{"max_new_tokens": NEW, "eos_token_id": (), **fields})
    return [piece for piece in model.stream([prompt], settings, conversation) if piece.token is not None]


def shown(found: list[TextPiece]) -> tuple[list[int | None], list[str], str]:
    """What a reader sees: tokens, texts, and why it ended."""
    return [one.token for one in found], [one.text for one in found], found[-1].finish


@pytest.fixture
def guessing(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[int], int], None]:
    """`guessing(coming, seed)`: from then on rows guess as `Partly` does."""

    def start(coming: list[int], seed: int) -> None:
        monkeypatch.setattr(text_model, "Lookup", lambda: Partly(coming, seed))

    return start


FAMILIES = [
    "llama",
    "gemma2",
    "bloom",
    "gpt2",
    "mixtral",
    "deepseek_v3",
    "gemma3n_text",
    "lfm2",
    "mamba2",
    "qwen3_next",
]


@pytest.mark.one_row_in(3)
@pytest.mark.parametrize("family", slow_but(FAMILIES, "lfm2"))
def test_tokens_and_text_do_not_depend_on_the_guesses(
    tmp_path: Path, guessing: Callable[[list[int], int], None], family: str
) -> None:
    folder = tmp_path / family
    save_tiny(family, folder, depth(family))
    export(folder, prefill=True, incremental=True)
    save_letters(folder)
    alone = pieces(TextModel.open(folder, speculate="off"), PROMPT)
    coming = [*PROMPT, *(int(one.token or 0) for one in alone)]
    guessed = 0
    for seed in range(4):
        guessing(coming, seed)
        found = pieces(TextModel.open(folder), PROMPT)
        assert shown(found) == shown(alone)
        guessed += sum(one.guessed for one in found)
    assert guessed > NEW


@pytest.mark.parametrize(
    "fields",
    [
        {"do_sample": True, "top_k": 0, "seed": 3},
        {"do_sample": True, "temperature": 2.0, "top_p": 0.9},
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2},
        {"max_new_tokens": 7},
    ],
    ids=str,
)
def test_samples_and_penalties_do_not_depend_on_the_guesses(
    talking: Path, guessing: Callable[[list[int], int], None], fields: dict[str, Any]
) -> None:
    alone = pieces(TextModel.open(talking, speculate="off"), PROMPT, **fields)
    for seed in range(3):
        guessing([*PROMPT, *(int(one.token or 0) for one in alone)], seed)
        assert shown(pieces(TextModel.open(talking), PROMPT, **fields)) == shown(alone)


def test_a_sequence_ends_within_guessed_tokens(talking: Path, guessing: Callable[[list[int], int], None]) -> None:
    model = TextModel.open(talking)
    alone = pieces(TextModel.open(talking, speculate="off"), PROMPT)
    guessing([*PROMPT, *(int(one.token or 0) for one in alone)], 0)
    tokens, texts, _ = shown(alone)
    for at in (3, 5, 8):
        end = tokens[at]
        found = shown(pieces(model, PROMPT, eos_token_id=(end,)))
        assert found[0] == tokens[: tokens.index(end) + 1]
        assert found[2] == "eos"
        stop = "".join(texts)[at : at + 3]
        text, finish = "".join(shown(pieces(model, PROMPT, stop_strings=(stop,)))[1]), "stop"
        assert (text, finish) == ("".join(texts).partition(stop)[0], "stop")


@pytest.mark.parametrize(
    "options", slow_but([{}, {"cache": "shared-buffer"}, {"target": "ort-cpu", "cache": "shared-buffer"}], {}), ids=str
)
def test_a_conversation_goes_on_after_guessed_tokens(
    tiny: Callable[[str], Path], tmp_path: Path, guessing: Callable[[list[int], int], None], options: dict[str, Any]
) -> None:
    folder = save_letters(Path(shutil.copytree(tiny("llama"), tmp_path / "model")))
    export(folder, prefill=True, incremental=True, **options)
    alone, model = TextModel.open(folder, speculate="off"), TextModel.open(folder)
    first = pieces(alone, PROMPT)
    coming = [*PROMPT, *(int(one.token or 0) for one in first)]
    second = [*coming, 33, 43]
    expected = pieces(alone, second)
    guessing(coming, 1)
    conversation = Conversation()
    assert shown(pieces(model, PROMPT, conversation)) == shown(first)
    assert conversation.ids == coming[:-1]
    guessing([*second, *(int(one.token or 0) for one in expected)], 2)
    assert shown(pieces(model, second, conversation)) == shown(expected)


def test_a_shared_buffer_keeps_its_memory_when_tokens_are_taken_back(
    tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = save_letters(Path(shutil.copytree(tiny("llama"), tmp_path / "model")))
    export(folder, prefill=True, incremental=True, cache="shared-buffer")
    runner = TextModel.open(folder).runner
    ids, mask = np.array([PROMPT]), np.ones((1, len(PROMPT)), np.int64)
    cache = runner.prefill(ids, mask, mask.cumsum(1) - 1).present
    assert isinstance(cache, BufferCache)
    shorter = taken_back(cache, 5)
    assert isinstance(shorter, BufferCache)
    assert shorter.buffers is cache.buffers
    step = runner.decode(ids[:, 5:], mask, mask.cumsum(1)[:, 5:] - 1, shorter)
    assert isinstance(step.present, BufferCache)
    assert step.present.buffers is cache.buffers


def test_a_graph_that_scores_only_the_last_token_runs_one_by_one(
    tiny: Callable[[str], Path], tmp_path: Path, guessing: Callable[[list[int], int], None]
) -> None:
    folder = save_letters(Path(shutil.copytree(tiny("llama"), tmp_path / "model")))
    export(folder, prefill=True, incremental=True, last_logits=True)
    alone = pieces(TextModel.open(folder, speculate="off"), PROMPT)
    guessing([*PROMPT, *(int(one.token or 0) for one in alone)], 0)
    files = folder / "prefill.onnx", folder / "decode.onnx"
    for model in (TextModel.open(folder), TextModel.open(*files)):
        found = pieces(model, PROMPT)
        assert shown(found) == shown(alone)
        assert not any(one.guessed for one in found)
    (folder / "llmconv.json").unlink()  # then only the first call tells
    assert shown(pieces(TextModel.open(*files), PROMPT)) == shown(alone)


@pytest.mark.parametrize(
    "options", slow_but([{"quant": "int4"}, {"quant": "int8"}, {"precision": "float16"}], {"quant": "int4"}), ids=str
)
def test_graphs_that_round_activations_run_one_token_per_call(
    tiny: Callable[[str], Path], tmp_path: Path, guessing: Callable[[list[int], int], None], options: dict[str, Any]
) -> None:
    out = tmp_path / "out"
    export(tiny("llama"), output=out, prefill=True, incremental=True, **options)
    save_letters(out)
    alone = pieces(TextModel.open(out, speculate="off"), PROMPT, max_new_tokens=200)
    guessing([*PROMPT, *(int(one.token or 0) for one in alone)], 0)
    found = pieces(TextModel.open(out), PROMPT, max_new_tokens=200)
    assert shown(found) == shown(alone)
    assert not any(one.guessed for one in found)


@pytest.mark.parametrize(
    ("text", "preferred", "expected"),
    [
        ([1, 2, 3, 9, 1, 2, 3], 0, (3, 3)),
        ([5, 2, 3, 9, 1, 2, 3, 7, 2, 3], 0, (2, 7)),
        ([5, 2, 3, 9, 1, 2, 3, 7, 2, 3], 3, (2, 3)),  # the passage that went on so far
        ([1, 2, 3, 4], 0, (0, 0)),
        ([1, 2, 3, 4], 2, (1, 2)),  # the passage goes on after one other token
        ([7, 7, 7, 7], 0, (3, 3)),
        ([4], 0, (0, 0)),
        ([4], 1, (0, 0)),
    ],
)
def test_the_longest_match_is_found(text: list[int], preferred: int, expected: tuple[int, int]) -> None:
    assert longest_match(np.array(text), preferred) == expected


def times(lookup: Lookup, one: float, more: float) -> None:
    """Notes calls of one token, and of 2 to 16 with the time of the others per token."""
    for width in (1, 2, 4, 8, 16):
        for _ in range(20):
            lookup.took(width, one + more * (width - 1), width)


def test_the_number_of_guesses_follows_what_calls_cost_and_how_guesses_fare() -> None:
    passage = np.array([*range(20, 60), *range(20, 40)])
    cheap, dear = Lookup(), Lookup()
    assert not len(cheap.guess(passage, 99))  # the time of a call is unknown yet
    times(cheap, 1.0, 0.05)
    times(dear, 1.0, 1.2)
    assert cheap.guess(passage, 99).tolist() == list(range(40, 40 + MOST))
    assert cheap.guess(passage, 3).tolist() == [40, 41, 42]
    assert not len(dear.guess(passage, 99))
    assert not len(cheap.guess(passage, 0))
    random = np.random.default_rng(0)
    text = passage
    for _ in range(60):  # the passage never goes on: guesses stop
        text = np.concatenate([text, random.integers(100, 1000, 1), passage[:20]])
        cheap.guess(text, 99)
    assert not len(cheap.guess(np.concatenate([text, [7], passage[:20]]), 99))


@pytest.mark.parametrize("cost", [0.02, 0.3, 1.0, 3.0])
def test_wrong_guesses_cost_no_more_than_a_call_and_a_hundredth_of_the_calls(cost: float) -> None:
    lookup, random, seconds, calls = Lookup(), np.random.default_rng(0), 0.0, 0
    text = np.array([*range(20, 60), *range(20, 40)])
    for _ in range(1000):  # a passage that seems to go on, and never does
        guess = lookup.guess(text, 99)
        spent = 1 + cost * len(guess)
        lookup.took(1 + len(guess), spent)
        seconds, calls = seconds + spent, calls + 1
        text = np.concatenate([text, random.integers(100, 1000, 1), text[:20]])
    assert seconds <= 1.01 * calls + 1 + cost * MOST  # the first call of a width is of unknown time


def test_near_ties_are_left_to_a_call_of_one_token() -> None:
    assert is_close(np.array([1.0, 1.0009, 0.2]), 2**-9)
    assert not is_close(np.array([1.0, 1.1, 0.2]), 2**-9)
    assert is_close(np.array([-40.0, 1.0, 1.05]), 2**-9)  # rounding is relative to the largest magnitude
    assert not is_close(np.array([-np.inf, 1.0, -np.inf]), 2**-9)
    assert is_close(np.array([np.nan, 1.0]), 2**-9)


def test_ties_run_again_one_by_one(talking: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = pieces(TextModel.open(talking, speculate="off"), PROMPT)
    coming = [*PROMPT, *(int(one.token or 0) for one in alone)]
    monkeypatch.setattr(text_model, "Lookup", lambda: Partly(coming, 0))
    monkeypatch.setattr(loop, "ROUNDING", 0.05)
    some = pieces(TextModel.open(talking), PROMPT)
    assert shown(some) == shown(alone)
    monkeypatch.setattr(loop, "ROUNDING", 10.0)  # everything is a tie
    found = pieces(TextModel.open(talking), PROMPT)
    assert shown(found) == shown(alone)
    assert not any(one.guessed for one in found)


def test_what_was_saved_is_reported(talking: Path, guessing: Callable[[list[int], int], None]) -> None:
    options: dict[str, Any] = {"max_new_tokens": NEW, "eos_token_id": ()}
    alone = generate(talking, "abcabc", speculate="off", **options)
    assert alone.as_dict()["tokens_per_call"] == 1
    model = TextModel.open(talking)
    guessing([*model.encode("abcabc"), *alone.completions[0].tokens], 0)
    found = generate(talking, "abcabc", **options)
    assert found.completions[0].text == alone.completions[0].text
    assert found.as_dict()["tokens_per_call"] > 1.05
    assert " per call" in found.total.summary()


@pytest.fixture
def drafting(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """`drafting(seed)`: from then on a draft model guesses as often and as much as random numbers say."""

    def start(seed: int) -> None:
        random = np.random.default_rng(seed)
        monkeypatch.setattr(Draft, "_count", lambda _, hit, most: int(random.integers(0, min(most, 6) + 1)))

    return start


@pytest.mark.quick_rows("lfm2-{}")
@pytest.mark.parametrize(
    ("family", "options"),
    [("llama", {}), ("llama", {"cache": "shared-buffer"}), ("lfm2", {}), ("llama", {"postprocess": "argmax"})],
    ids=str,
)
def test_a_draft_model_changes_no_token_and_guesses_what_it_finds_likeliest(
    talking: Path, tmp_path: Path, drafting: Callable[[int], None], family: str, options: dict[str, Any]
) -> None:
    draft = tmp_path / "draft"
    save_tiny(family, draft, depth(family))
    save_letters(draft)
    export(draft, prefill=True, incremental=True, **options)
    save_letters(draft)
    large = TextModel.open(talking, speculate="off")
    cases: list[dict[str, Any]] = [{}, {"do_sample": True, "seed": 3}, {"max_new_tokens": 3}]
    for seed, fields in enumerate(cases):
        drafting(seed)
        alone = pieces(large, PROMPT, **fields)
        assert shown(pieces(TextModel.open(talking, speculate=draft), PROMPT, **fields)) == shown(alone)
    drafting(0)
    itself = TextModel.open(draft, speculate="off")
    text = np.array([*PROMPT, *(int(one.token or 0) for one in pieces(itself, PROMPT))])
    guesser, random = Draft(itself.runner, itself.positions, 1000), np.random.default_rng(0)
    at, guessed = len(PROMPT), 0
    while at < len(text):
        guess = guesser.guess(text[:at], len(text) - at)
        assert guess.tolist() == text[at:][: len(guess)].tolist()
        at, guessed = at + 1 + int(random.integers(0, len(guess) + 1)), guessed + len(guess)
    assert guessed > NEW / 2
    wrong = np.array([*text[:20], 33, 43])  # other tokens came than those guessed
    again = Draft(itself.runner, itself.positions, 1000).guess(wrong, 6)
    least = min(len(again), len(guess := guesser.guess(wrong, 6)))
    assert again[:least].tolist() == guess[:least].tolist()


def test_a_draft_model_of_another_vocabulary_is_refused_and_a_useless_one_named(
    talking: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = Path(shutil.copytree(talking, tmp_path / "other"))
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    refused = CliRunner().invoke(main, ["generate", str(talking), "abc", "--speculate", str(other)])
    assert refused.exit_code == 3
    assert "has another vocabulary: 2 of 96 tokens differ, such as " in refused.stderr
    names = [f"token {at}" for at in range(900)]
    base, distilled = (
        SimpleNamespace(get_vocab=lambda names=names: {name: at for at, name in enumerate(names)})
        for names in (names, [*names[:-5], "<eos>", "<think>"])
    )
    assert shared_vocabulary(base, distilled) == 897
    for slip in ("of", "", None, 5, ["lookup"]):
        with pytest.raises(UsageProblem, match="`speculate` is "):
            TextModel.open(talking, speculate=slip)
    typed = CliRunner().invoke(main, ["generate", str(talking), "abc", "--speculate", "of"])
    assert (typed.exit_code, "give `lookup`, `off`, `mtp`, or the folder" in typed.stderr) == (2, True)
    missing = CliRunner().invoke(main, ["generate", str(talking), "abc", "--speculate", str(tmp_path / "no")])
    assert (missing.exit_code, "the smaller model of `--speculate`: `" in missing.stderr) == (3, True)
    TextModel.open(talking, backend="torch", speculate=talking)
    assert "the smaller model of `--speculate` is not used" in capsys.readouterr().err


def test_a_draft_model_guesses_less_where_it_is_wrong_or_slow(talking: Path) -> None:
    runner = TextModel.open(talking).runner
    counts = {}
    for hit in (0.0, 0.9):
        draft = Draft(runner, default_positions, 96)
        draft._hit, draft._seconds, draft._guess_seconds = hit, {1: 1.0, 2: 1.1, 4: 1.2, 8: 1.3, 16: 1.5}, 0.1
        counts[hit] = draft._count(draft._hit, 99)
        draft._guess_seconds = 2.0
        assert draft._count(draft._hit, 99) == 0
    assert counts[0.0] == 0
    assert counts[0.9] >= 7
    short = Draft(runner, default_positions, 96, context_length=9)
    short._seconds = {1: 1.0}
    assert len(short.guess(np.array(PROMPT), 99)) == 1  # its context has one token left
    assert not len(short.guess(np.array([*PROMPT, 5]), 99))
    assert not len(short.guess(np.array([99] * 4), 99))  # no token of it
