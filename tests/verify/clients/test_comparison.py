"""How the tokens of a client are judged: the likeliest, up to near-ties, up to the end token."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from llmconv.errors import MalformedInput
from llmconv.verify.clients.comparison import (
    NEW,
    Client,
    ClientChecks,
    EagerLogits,
    Generation,
    PaddedBatch,
    end_tokens,
    judged,
    lengths_problem,
    up_to_end,
)
from llmconv.verify.sigma import ExpectedOutput

ENDS = frozenset({2})


def expected(logits: list[list[list[float]]], noise: float = 1e-3) -> ExpectedOutput:
    exact = np.array(logits, dtype=np.float64)
    rows = np.full(exact.shape[:2], noise)
    return ExpectedOutput(exact, rows, noise, rows, np.ones(exact.shape[:2], dtype=bool))


def batch(*rows: list[int]) -> PaddedBatch:
    return PaddedBatch([[3]] * len(rows), rows, "left")


def test_the_likeliest_tokens_are_right() -> None:
    assert judged(expected([[[0, 1, 5], [4, 1, 0]]]), batch([2, 0]), "the model") == ("", "2 tokens")


def test_a_near_tie_is_right_and_is_counted() -> None:
    assert judged(expected([[[0, 5.001, 5]]]), batch([2]), "the model") == ("", "1 tokens, 1 of them by a near-tie")


def test_another_token_is_wrong_and_the_earliest_is_named() -> None:
    logits = [[[0.0, 1.0, 5.0], [4.0, 1.0, 0.0]], [[0.0, 1.0, 5.0], [4.0, 1.0, 0.0]]]
    problem, _ = judged(expected(logits), batch([2, 1], [1, 1]), "the model")
    assert problem.startswith("prompt 1, new token 0: 1 instead of 2, whose logit in the model is larger by 4 ")


def test_padding_after_the_end_of_a_row_is_not_judged() -> None:
    logits = expected([[[0.0, 0.0, 5.0], [4.0, 1.0, 0.0]]])
    valid = np.array([[True, False]])
    short = ExpectedOutput(logits.exact, logits.noise, logits.total_noise, logits.max_noise, valid)
    assert judged(short, batch([2, 1]), "the model") == ("", "1 tokens")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_make_no_token_right(bad: float) -> None:
    assert judged(expected([[[bad, bad, bad]]]), batch([0]), "the model")[0]
    assert judged(expected([[[0.0, 1.0, 2.0]]], noise=bad), batch([0]), "the model")[0]


def test_tokens_are_cut_after_the_first_end_token() -> None:
    assert up_to_end([5, 2, 7, 2], ENDS) == [5, 2]
    assert up_to_end([5, 7], ENDS) == [5, 7]


def problem(*rows: list[int]) -> str:
    kept = [up_to_end(row, ENDS) for row in rows]
    return lengths_problem([[1]] * len(rows), rows, kept, ENDS)


def test_a_row_ends_at_the_limit_or_at_an_end_token() -> None:
    assert problem([5] * NEW) == ""
    assert problem([5, 2]) == ""
    assert problem([5, 2, 0, 0], [5] * NEW) == ""
    assert problem([5, 5]) == "it stopped after 2 new tokens without an end token"
    assert problem([]) == "it stopped after 0 new tokens without an end token"
    assert problem([5, 2, 7]) == "it went on after an end token"
    assert problem([5] * (NEW + 1)) == f"{NEW + 1} new tokens where {NEW} were asked for"
    assert lengths_problem([[1], [2]], [[2]], [[2]], ENDS) == "1 rows for 2 prompts"


@pytest.mark.parametrize(
    ("generation", "config", "found"),
    [
        ({"eos_token_id": [7, 8]}, {"eos_token_id": 2}, [{7, 8}]),
        ({}, {"eos_token_id": 2}, [set(), {2}]),
        (None, {"eos_token_id": 2}, [{2}]),
        (None, {}, [set()]),
        ({}, {}, [set()]),
    ],
)
def test_end_tokens_are_those_of_the_generation_config_first(
    tmp_path: Path, generation: dict[str, object] | None, config: dict[str, object], found: list[set[int]]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert end_tokens(tmp_path) == [frozenset(one) for one in found]


@pytest.mark.parametrize("token", [-1, 100_000])
def test_a_token_outside_the_vocabulary_is_wrong(talking: Path, monkeypatch: pytest.MonkeyPatch, token: int) -> None:
    checks = ClientChecks([Client("optimum", "")], talking, talking, lambda: EagerLogits(talking, "float32", None))
    rows = [[[token] * NEW for _ in prompts] for prompts in checks.batches]
    monkeypatch.setattr(Client, "generate", lambda *_: Generation({}, end_tokens(talking)[0], rows))
    (found,) = checks.checks()
    assert {check.detail for check in found if check.output} == {f"token {token} is outside the vocabulary"}
    assert all(check.verdict == "fail" for check in found if check.output)


@pytest.mark.parametrize("given", [[[2]], {"a": 1}, "x", True, 2.5])
def test_end_tokens_that_are_no_numbers_are_refused(tmp_path: Path, given: object) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": given}))
    with pytest.raises(MalformedInput, match="eos_token_id"):
        end_tokens(tmp_path)


@pytest.mark.quick_rows("genai--1-pass", "optimum--1-fail")
@pytest.mark.parametrize(
    ("client", "end", "verdict"),
    [("genai", 0, "fail"), ("genai", -1, "pass"), ("optimum", -1, "fail"), ("optimum", None, "pass")],
)
def test_a_client_ends_at_no_token_that_is_none_of_the_model(
    talking: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, client: str, end: int | None, verdict: str
) -> None:
    config = json.loads((talking / "config.json").read_text()) | {"eos_token_id": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    ends = frozenset[int]() if end is None else frozenset({end % config["vocab_size"]})
    checks = ClientChecks([Client(client, "")], talking, tmp_path, lambda: EagerLogits(talking, "float32", None))
    rows = [[[0] * NEW for _ in prompts] for prompts in checks.batches]
    monkeypatch.setattr(Client, "generate", lambda *_: Generation({}, ends, rows))
    (listed,) = checks.checks()
    assert (listed[0].name, listed[0].verdict) == ("end tokens", verdict)
