"""Rotary frequencies that depend on the length (longrope, dynamic NTK): no cache and no batch changes a text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from llmconv.errors import InputRefused
from llmconv.generation import Conversation, SharedPrefix, TextModel
from llmconv.serve.served_model import ConversationPool
from tests.builders.talking import save_letters
from tests.conftest import save_tiny

ORIGINAL = 24
LONG: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [1.5, 3.0, 6.0, 12.0],
    "original_max_position_embeddings": ORIGINAL,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "longrope": ("llama", {"max_position_embeddings": 96, "rope_parameters": {**LONG, "factor": 4.0}}),
    "dynamic": ("llama", {"max_position_embeddings": ORIGINAL, "rope_parameters": DYNAMIC}),
    "phi3": (
        "phi3",
        {
            "max_position_embeddings": 96,
            "original_max_position_embeddings": ORIGINAL,
            "rope_parameters": LONG,
            "pad_token_id": 0,
        },
    ),
}
PROMPT = [(7 * at) % 90 + 1 for at in range(60)]
Expected = Callable[..., list[int]]


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TextModel]:
    """A tiny model of one kind, run by torch."""
    kind, fields = KINDS[request.param]
    folder = save_letters(save_tiny(kind, tmp_path_factory.mktemp("switch"), **SIZES, **fields))
    yield TextModel.open(folder, backend="torch", dtype="float32")


def continued(model: TextModel, prompts: list[list[int]], cache: Any = None, most: int = 0) -> list[list[int]]:
    """Eight new tokens of each prompt."""
    found: list[list[int]] = [[] for _ in prompts]
    for piece in model.stream(prompts, model.defaults.but(max_new_tokens=8, eos_token_id=()), cache, most):
        found[piece.index] += [piece.token] if piece.token is not None else []
    return found


def of_transformers(model: TextModel, expected: Expected, tokens: int) -> list[int]:
    """What transformers writes after the first tokens."""
    return expected(model.folder, PROMPT[:tokens], max_new_tokens=8, do_sample=False, eos_token_id=None)


@pytest.mark.parametrize("tokens", [8, ORIGINAL - 4, ORIGINAL, ORIGINAL + 1, 50])
def test_a_text_is_that_of_transformers_on_both_sides_of_the_original_context(
    model: TextModel, expected: Expected, tokens: int
) -> None:
    assert continued(model, [PROMPT[:tokens]]) == [of_transformers(model, expected, tokens)]


@pytest.mark.parametrize("tokens", [ORIGINAL, 50])
def test_a_prompt_in_pieces_gives_the_same(model: TextModel, tokens: int) -> None:
    assert continued(model, [PROMPT[:tokens]], most=6) == continued(model, [PROMPT[:tokens]])


@pytest.mark.parametrize("first, then", [(6, 12), (10, 30), (20, 60), (30, 50), (50, 30), (50, 12), (20, 23)])
def test_a_kept_cache_changes_no_text(model: TextModel, first: int, then: int) -> None:
    conversation = Conversation()
    continued(model, [PROMPT[:first]], conversation)
    assert continued(model, [PROMPT[:then]], conversation) == continued(model, [PROMPT[:then]])


def test_a_short_chat_still_uses_its_cache_and_a_long_one_takes_none(model: TextModel) -> None:
    conversation, pool = Conversation(), ConversationPool(2)
    continued(model, [PROMPT[:6]], conversation)
    ran = list(conversation.ids)
    assert conversation.past([[*ran, 1]], model.runner)
    pool.keep(conversation)
    for more, is_used in ((PROMPT[:20], False), ([1], True)):
        prompt = [*ran, *more]
        assert bool(pool.continued(prompt).past([prompt], model.runner)) is is_used


@pytest.mark.quick_rows("longrope")
def test_a_shared_start_and_a_batch_change_no_text(model: TextModel) -> None:
    prompts = [PROMPT[:6], PROMPT[:20], PROMPT[:50]]
    alone = [continued(model, [prompt])[0] for prompt in prompts]
    assert continued(model, prompts) == alone
    assert continued(model, prompts, SharedPrefix(PROMPT[:5], model.positions)) == alone


@pytest.mark.quick_rows("dynamic")
def test_beams_are_those_of_transformers(model: TextModel, expected: Expected) -> None:
    fields = {"max_new_tokens": 8, "num_beams": 3, "do_sample": False, "eos_token_id": None}
    for tokens in (ORIGINAL - 4, 40):
        settings = model.defaults.but(max_new_tokens=8, num_beams=3, eos_token_id=())
        assert model.search(PROMPT[:tokens], settings, 1) == [expected(model.folder, PROMPT[:tokens], **fields)]


@pytest.mark.slow
def test_graphs_of_a_fixed_size_refuse_what_they_would_read_in_pieces(tmp_path: Path) -> None:
    from llmconv.export.exporter import export  # noqa: PLC0415

    kind, fields = KINDS["longrope"]
    folder = save_letters(save_tiny(kind, tmp_path / "m", **SIZES, **fields))
    whole = continued(TextModel.open(folder, backend="torch", dtype="float32"), [PROMPT[:20]])
    export(folder, shapes="static", max_seq_len=64, prompt_len=16)
    model = TextModel.open(folder)
    assert continued(model, [PROMPT[:20]]) == whole
    with pytest.raises(InputRefused, match="read in pieces: beyond 24 tokens the rotary frequencies"):
        continued(model, [PROMPT[:40]])
