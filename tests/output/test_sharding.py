"""Distribution of tensors when the source's files are kept."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmconv.output.plan import by_size, by_source
from llmconv.tensors import BY_NAME, LazyTensor, in_memory

FILES = {"a": "1", "b": "1", "c": "2", "d": "2"}


def sized(**sizes: int) -> dict[str, LazyTensor]:
    """Tensors of so many bytes."""
    return {name: in_memory(np.zeros(size, np.uint8), BY_NAME["uint8"]) for name, size in sizes.items()}


def names(groups: list[dict[str, LazyTensor]]) -> list[str]:
    return ["".join(group) for group in groups]


def test_tensors_stay_in_their_files_however_large() -> None:
    assert names(by_source(sized(a=9, b=9, c=1, d=1), FILES, 10)) == ["ab", "cd"]


def test_a_new_tensor_joins_the_one_before_it() -> None:
    assert names(by_source(sized(a=1, x=1, b=1, c=1, d=1, y=1), FILES, 10)) == ["axb", "cdy"]


def test_a_new_tensor_in_front_joins_the_first_file() -> None:
    assert names(by_source(sized(x=1, a=1, b=1, c=1), FILES, 10)) == ["xab", "c"]


def test_new_tensors_that_find_no_room_get_files_of_their_own() -> None:
    assert names(by_source(sized(a=4, b=4, c=1, d=1, x=4, y=4, z=4), FILES, 5)) == ["ab", "cdx", "yz"]


def test_the_largest_file_of_the_source_is_room_enough() -> None:
    assert names(by_source(sized(a=30, c=1, x=20), FILES, 5)) == ["a", "cx"]


def test_a_file_of_which_nothing_is_left_is_gone() -> None:
    assert names(by_source(sized(c=1, d=1), FILES, 10)) == ["cd"]


@pytest.mark.slow
@given(
    tensors=st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 9)),
    files=st.dictionaries(st.sampled_from("abcdef"), st.sampled_from("123")),
    limit=st.integers(1, 20),
)
def test_every_tensor_lies_in_one_file_with_those_it_came_with(
    tensors: dict[str, int], files: dict[str, str], limit: int
) -> None:
    together = ["ah", "gb"]
    unit = [{*names} & {*tensors} for names in together]
    for groups in (by_source(sized(**tensors), {}, limit, together), by_size(sized(**tensors), limit, together)):
        assert sorted("".join(names(groups))) == sorted(tensors) and all(groups)
        small = [one for one in unit if sum(tensors[name] for name in one) <= limit]
        assert all(sum(bool(one & {*group}) for group in groups) <= 1 for one in small)
    for groups in (by_source(sized(**tensors), files, limit), by_size(sized(**tensors), limit)):
        assert sorted("".join(names(groups))) == sorted(tensors) and all(groups)
        assert all(list(group) == [name for name in tensors if name in group] for group in groups)
    kept = [{files[name] for name in group if name in files} for group in by_source(sized(**tensors), files, limit)]
    assert all(len(homes) <= 1 for homes in kept)
    assert sum(map(len, kept)) == len({files[name] for name in tensors if name in files})
