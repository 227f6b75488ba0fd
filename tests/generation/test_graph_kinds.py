"""All kinds of graphs give the same text."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmconv.errors import InputRefused
from llmconv.export.exporter import export
from llmconv.generation import Conversation, SharedPrefix, TextModel
from tests.builders.prefix_models import save_adapter

pytestmark = pytest.mark.slow

KINDS: dict[str, dict[str, Any]] = {
    "unified": {"unified": True},
    "last logits": {"last_logits": True},
    "stages": {"stages": 2},
    "shared buffer": {"cache": "shared-buffer"},
    "static": {"shapes": "static", "batch_size": 4, "max_seq_len": 96, "prompt_len": 16},
    "ort-cpu": {"target": "ort-cpu", "cache": "shared-buffer"},
}
START = [20, 30, 40, 50, 60, 70]


def prompts() -> list[list[int]]:
    """Four prompts of mixed lengths with the same beginning."""
    rng = np.random.default_rng(5)
    return [[*START, *rng.integers(3, 96, size=size).tolist()] for size in (9, 1, 20, 4)]


def tokens_of(model: TextModel, ids: list[list[int]], cache: Any = None, **fields: Any) -> list[list[int]]:
    """New tokens of every prompt, which end at different times."""
    found: list[list[int]] = [[] for _ in ids]
    settings = model.defaults.but(**{"max_new_tokens": 24, "eos_token_id": (15, 10, 64, 2), **fields})
    for piece in model.stream(ids, settings, cache):
        found[piece.index] += [] if piece.token is None else [piece.token]
    return found


def exported(talking: Path, folder: Path, **options: Any) -> TextModel:
    """The model with graphs of another kind."""
    shutil.copytree(talking, folder, ignore=shutil.ignore_patterns("*.onnx", "llmconv.json"))
    export(folder, **options)
    return TextModel.open(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_graph_gives_the_same_tokens(talking: Path, tmp_path: Path, kind: str) -> None:
    usual, model = TextModel.open(talking), exported(talking, tmp_path / "model", **KINDS[kind])
    expected = tokens_of(usual, prompts())
    assert tokens_of(model, prompts()) == expected
    assert tokens_of(model, prompts(), SharedPrefix(START)) == expected
    assert tokens_of(model, prompts()[:2], num_beams=2) == tokens_of(usual, prompts()[:2], num_beams=2)
    conversation = Conversation()
    for ids in (START, [*START, 7, 8, 9], [*START, 7, 5]):
        assert tokens_of(model, [ids], conversation) == tokens_of(usual, [ids])


def test_a_tuned_prefix_is_before_every_prompt_and_shared_prefix(talking: Path, tmp_path: Path, tiny: Any) -> None:
    adapter = save_adapter(tiny("llama"), tmp_path / "adapter", "PrefixTuning")
    model = exported(talking, tmp_path / "model", prefix=adapter)
    alone = [tokens_of(model, [ids])[0] for ids in prompts()]
    assert tokens_of(model, prompts()) == alone
    assert tokens_of(model, prompts(), SharedPrefix(START)) == alone
    assert alone != tokens_of(TextModel.open(talking), prompts())


def test_fixed_buffers_refuse_long_prompts_and_end_long_texts(talking: Path, tmp_path: Path) -> None:
    model = exported(talking, tmp_path / "model", **KINDS["static"])
    assert (model.context_length, model.sequences) == (96, 4)
    with pytest.raises(InputRefused, match="the prompt has 97 tokens"):
        tokens_of(model, [[5] * 97])
    assert len(tokens_of(model, [[5] * 90], eos_token_id=(), max_new_tokens=50)[0]) == 7
