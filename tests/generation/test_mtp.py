"""`--speculate mtp`: the model's own MTP head guesses; the text stays the same, and the guesses are transformers'."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from llmconv.cli import main
from llmconv.errors import InputRefused, UsageProblem
from llmconv.export import export
from llmconv.generation import Conversation, TextModel
from llmconv.generation.mtp import MtpGuesser
from llmconv.runtime import extra_inputs
from llmconv.runtime.runner import default_positions
from tests.builders.mtp_models import save_with_head
from tests.builders.slow_rows import slow_but
from tests.builders.talking import save_letters
from tests.generation.test_speculation import NEW, PROMPT, pieces, shown

KINDS = slow_but(("glm4_moe", "deepseek_v3", "mellum"), "glm4_moe")
LETTERS = {"vocab_size": 128}


class Always(MtpGuesser):
    """Guesses at every step, whatever the time of calls."""

    def _count(self, hit: float, most: int) -> int:
        return min(3, most)


def guessing(folder: Path, form: str = "auto") -> TextModel:
    """The model of a folder, which guesses at every step."""
    model = TextModel.open(folder, speculate="mtp", form=form)
    assert isinstance(model.speculate, partial)
    return replace(model, speculate=partial(Always, *model.speculate.args))


def exported(folder: Path, kind: str, *, one_token: bool = False) -> Path:
    """A model with graphs; with `one_token` it always says the same, and its head knows that."""
    save_with_head(folder, kind, **LETTERS)
    if one_token:
        state = load_file(folder / "model.safetensors")
        state["model.embed_tokens.weight"][:, 0] = 40
        projection = next(name for name in state if name.endswith(("eh_proj.weight", "fc.weight")))
        state[projection][0] = 0
        state[projection][0, 0] = 40
        state["lm_head.weight"][77] = 0
        state["lm_head.weight"][77, 0] = 9
        save_file(state, folder / "model.safetensors", {"format": "pt"})
    save_letters(folder)
    export(folder, mtp=True)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported(tmp_path_factory.mktemp("mtp") / "model", "glm4_moe")


@pytest.mark.parametrize("form", ["auto", "file"])
@pytest.mark.parametrize("fields", [{}, {"do_sample": True, "seed": 3, "temperature": 3.0}], ids=["greedy", "sampled"])
def test_the_text_is_the_same_where_guesses_are_wrong(folder: Path, form: str, fields: dict[str, Any]) -> None:
    alone = pieces(TextModel.open(folder, speculate="off", form=form), PROMPT, **fields)
    found = pieces(guessing(folder, form), PROMPT, **fields)
    assert shown(found) == shown(alone) and len(found) == NEW


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["glm4_moe", "deepseek_v3", "mellum"])
def test_the_text_is_the_same_where_guesses_are_right(kind: str, tmp_path: Path) -> None:
    model = exported(tmp_path / kind, kind, one_token=True)
    alone, found = pieces(TextModel.open(model, speculate="off"), PROMPT), pieces(guessing(model), PROMPT)
    assert shown(found) == shown(alone)
    assert sum(piece.guessed for piece in found) > NEW // 2


def test_a_second_turn_is_the_same(folder: Path) -> None:
    texts = {}
    for way in ("off", "mtp"):
        model = guessing(folder) if way == "mtp" else TextModel.open(folder, speculate=way)
        conversation = Conversation()
        first = pieces(model, PROMPT, conversation)
        more = [*PROMPT, *(int(piece.token or 0) for piece in first), 33, 44]
        texts[way] = shown(pieces(model, more, conversation))
    assert texts["mtp"] == texts["off"]


def test_the_first_guess_is_that_of_transformers(folder: Path) -> None:
    eager = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    eager._keys_to_ignore_on_load_unexpected = {rf"\.layers\.{eager.config.num_hidden_layers}\."}
    head = MtpModel.from_pretrained(eager).eval()
    ids = torch.randint(3, 120, (1, 14), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        hidden = eager.get_decoder()(ids[:, :-1]).last_hidden_state
        positions, cache = torch.arange(1, ids.shape[1])[None], MtpCache(config=eager.config.get_mtp_config())
        tokens, _, _ = head(ids[:, 1:], hidden, None, positions, cache)
    make = TextModel.open(folder, speculate="mtp").speculate
    assert callable(make)
    guesser = make()
    guesser.read(0, hidden[0, :6].numpy())
    guesser.read(6, hidden[0, 6:].numpy())
    guesser.took(1, 1.0)  # until then it is not known what a guess saves
    assert guesser.guess(ids[0].numpy(), 4)[0] == tokens[0, 0]


def test_a_folder_without_the_head_is_refused_with_the_way_out(tmp_path: Path) -> None:
    save_with_head(tmp_path / "plain", "glm4_moe", **LETTERS)
    save_letters(tmp_path / "plain")
    export(tmp_path / "plain", unified=True)
    words = ["generate", str(tmp_path / "plain"), "--prompt", "a", "--speculate", "mtp"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == InputRefused.exit_code
    assert "has no `mtp.onnx`" in result.stderr and "hint: `llmconv export MODEL --mtp" in result.stderr


def test_a_prompt_in_parts_has_all_hidden_states(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = TextModel.open(folder).runner
    ids, mask = np.array([PROMPT]), np.ones((1, len(PROMPT)), np.int64)
    whole = runner.prefill(ids, mask, default_positions(mask, len(PROMPT)))
    monkeypatch.setattr(extra_inputs, "PART", 3)
    parts = runner.prefill(ids, mask, default_positions(mask, len(PROMPT)), last_only=True)
    assert whole.hidden is not None and parts.hidden is not None and parts.logits.shape[1] == 1 < len(PROMPT) / 3
    np.testing.assert_allclose(parts.hidden, whole.hidden, atol=1e-5)


def test_torch_is_refused(folder: Path) -> None:
    with pytest.raises(UsageProblem, match="`--speculate mtp` is for graphs"):
        TextModel.open(folder, backend="torch", speculate="mtp")
    assert np.all(np.array(PROMPT) < LETTERS["vocab_size"])
