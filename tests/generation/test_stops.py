"""Stop strings end a text wherever tokens are cut, and nothing of them is shown."""

from __future__ import annotations

from itertools import accumulate, pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from llmconv.generation import GenerationSettings, TextModel, generate
from llmconv.generation.row import Row, RowStart, StopStrings, pieces_of
from llmconv.runtime.tokenizer import TokenDecoder
from tests.builders.talking import save_letters

LETTERS = st.text(alphabet="ab#\n", max_size=12)


@pytest.mark.slow
@given(text=LETTERS, stops=st.lists(LETTERS.filter(bool), max_size=3), cuts=st.lists(st.integers(0, 12), max_size=5))
def test_the_text_ends_before_the_first_stop_string_whatever_the_pieces(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    stream = StopStrings(stops)
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    found = "".join(stream.push(text[a:b]) for a, b in pairwise(places)) + stream.close()
    ends = [end for stop in stops if (end := text.find(stop)) >= 0]
    if not ends:
        assert (found, stream.found) == (text, False)
    else:
        assert stream.found and text.startswith(found)
        assert not any(stop in found for stop in stops)


def test_the_possible_start_of_a_stop_string_is_held_back() -> None:
    stream = StopStrings(["\n###"])
    assert [stream.push(piece) for piece in ("a\n", "##", "b\n#", "##c")] == ["a", "", "\n##b", ""]
    assert stream.found


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["onnx", "torch"])
def test_generation_ends_at_a_stop_string_across_tokens(talking: Path, backend: str) -> None:
    whole = generate(talking, ["Once"], max_new_tokens=12).completions[0].text
    stop = whole[6:8]
    found = generate(talking, ["Once"], backend=backend, max_new_tokens=12, stop_strings=[stop]).completions[0]
    assert (found.text, found.finish) == (whole[: whole.index(stop)], "stop")
    assert len(found.tokens) == whole.index(stop) + 2


@pytest.mark.slow
@given(
    pieces=st.lists(st.tuples(st.sampled_from(["a", "b", "ab", "<>"]), st.booleans()), max_size=8),
    stops=st.lists(st.sampled_from(["<>", "a<>", "<>b", "b<>a", "ab"]), max_size=3),
)
def test_hidden_text_is_looked_at_but_never_shown(pieces: list[tuple[str, bool]], stops: list[str]) -> None:
    stream = StopStrings(stops)
    found = "".join(stream.push(piece, shown) for piece, shown in pieces) + stream.close()
    so_far = [*accumulate((piece for piece, _ in pieces), initial="")]
    # a text ends as soon as one of them is whole, though a longer one may begin before it
    whole = next((text for text in so_far if any(stop in text for stop in stops)), so_far[-1])
    shown = [flag for piece, flag in pieces for _ in piece]
    end = min((whole.find(stop) for stop in stops if stop in whole), default=len(whole))
    assert found == "".join(letter for letter, flag in zip(whole[:end], shown, strict=False) if flag)
    assert stream.found is any(stop in whole for stop in stops)


@pytest.mark.parametrize("stop", ["#", "c#", "bc#", "#d", "c#d", "#de", "c#!"])
@pytest.mark.parametrize("ends", [False, True])
def test_a_stop_string_may_contain_a_special_token(tmp_path: Path, stop: str, ends: bool) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(save_letters(tmp_path))
    tokenizer.add_special_tokens({"additional_special_tokens": ["#"]})
    tokens = tokenizer("abc#def")["input_ids"]
    settings = GenerationSettings(stop_strings=(stop,), eos_token_id=frozenset({tokens[3]} if ends else ()))
    pieces = list(pieces_of(Row(0, RowStart([1], 9), settings, TokenDecoder(tokenizer)), tokens))
    written = "abc#" if ends else "abc#def"
    text = written[: written.index(stop)] if stop in written else written.replace("#", "")
    assert "".join(piece.text for piece in pieces) == text
    assert pieces[-1].finish == ("eos" if ends else "stop" if stop in written else "length")


@pytest.mark.slow
def test_a_special_token_is_a_stop_string_of_a_model(talking: Path) -> None:
    model = TextModel.open(talking, backend="torch")
    tokens = generate(model, ["Once"], max_new_tokens=12, eos_token_id=[]).completions[0].tokens
    special = model.decode(tokens[3:4])
    model.tokenizer.add_special_tokens({"additional_special_tokens": [special]})
    found = generate(model, ["Once"], max_new_tokens=12, eos_token_id=[], stop_strings=[special]).completions[0]
    assert (found.finish, found.tokens) == ("stop", tokens[: tokens.index(tokens[3]) + 1])
