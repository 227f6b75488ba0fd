"""Stop strings end a text wherever tokens are cut, and nothing of them is shown."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmconv.generation import generate
from llmconv.generation.streaming import StopStrings

LETTERS = st.text(alphabet="ab#\n", max_size=12)


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


@pytest.mark.parametrize("backend", ["onnx", "torch"])
def test_generation_ends_at_a_stop_string_across_tokens(talking: Path, backend: str) -> None:
    whole = generate(talking, ["Once"], max_new_tokens=12).completions[0].text
    stop = whole[6:8]
    found = generate(talking, ["Once"], backend=backend, max_new_tokens=12, stop_strings=[stop]).completions[0]
    assert (found.text, found.finish) == (whole[: whole.index(stop)], "stop")
    assert len(found.tokens) == whole.index(stop) + 2
