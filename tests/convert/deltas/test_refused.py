"""Exact deltas: another base, a damaged file, and what is not a delta are refused; then nothing is made."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from llmconv.checkpoint import open_checkpoint
from llmconv.cli import main
from llmconv.convert import apply_delta, extract_delta, inspect, to_hf
from llmconv.errors import InputRefused, LlmconvError, MalformedInput, UsageProblem
from tests.builders.delta_models import frames, reindex, retell, save, save_pair, weights, write_index
from tests.builders.tiny_models import contents


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """A base and what was tuned from it."""
    return save_pair(tmp_path)


def test_another_base_is_refused_by_name_and_leaves_nothing(pair: tuple[Path, Path], tmp_path: Path) -> None:
    base, tuned = pair
    extract_delta(base, tuned, tmp_path / "delta")
    arrays = weights()
    arrays["model.norm.weight"][1][2] += 1e-6
    other = save(tmp_path / "other", arrays)
    with pytest.raises(InputRefused, match=r"`model\.norm\.weight` has other values") as refusal:
        apply_delta(other, tmp_path / "delta", tmp_path / "back")
    assert "called `base`" in refusal.value.hint
    assert {path.name for path in tmp_path.iterdir()} == {"base", "tuned", "other", "delta"}


def test_rows_of_the_base_that_the_tuned_model_lacks_are_checked_too(tmp_path: Path) -> None:
    base, tuned = save(tmp_path / "base", weights(9)), save(tmp_path / "tuned", weights(4))
    extract_delta(base, tuned, tmp_path / "delta")
    arrays = weights(9)
    arrays["lm_head.weight"][1][8] += 1
    with pytest.raises(InputRefused, match=r"have other values: `lm_head\.weight`"):
        apply_delta(save(tmp_path / "other", arrays), tmp_path / "delta", tmp_path / "back", dry_run=True)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda arrays: arrays.pop("lm_head.weight"), r"1 missing keys: `lm_head\.weight`"),
        (lambda arrays: arrays.update(weights(7)), r"2 tensors have another shape or dtype: `model\.embed"),
    ],
)
def test_a_base_of_another_kind_is_refused_unread(
    change: Callable[[Any], None], reason: str, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    extract_delta(*pair, tmp_path / "delta")
    arrays = weights()
    change(arrays)
    with pytest.raises(InputRefused, match=reason):
        apply_delta(save(tmp_path / "other", arrays), tmp_path / "delta", tmp_path / "back")


def flip(folder: Path) -> None:
    content = bytearray(frames(folder).read_bytes())
    content[20] ^= 1
    frames(folder).write_bytes(content)


def cut(folder: Path) -> None:
    frames(folder).write_bytes(frames(folder).read_bytes()[:-1])


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a flipped bit": (flip, "has a damaged frame"),
    "a lost byte": (cut, "has no index at its end"),
    "an empty file": (lambda folder: frames(folder).write_bytes(b""), "has no index at its end"),
    "no file": (lambda folder: frames(folder).unlink(), "`delta.zst` is missing"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "`config.json` is missing"),
    "no JSON": (lambda folder: write_index(folder, b"", b"{"), "not valid JSON"),
    "no tensors": (lambda folder: write_index(folder, b"", b"[]"), "an index without tensors"),
    "an entry that is none": (lambda folder: write_index(folder, b"", b'{"tensors": {"a": 1}}'), "impossible entry"),
    "an unknown dtype": (reindex(dtype="F3"), "unknown dtype 'F3'"),
    "an impossible shape": (reindex(shape=[-1]), "impossible shape"),
    "another shape": (reindex(shape=[10**9, 4], rows=10**5), "1 blocks for .* its shape needs"),
    "blocks of a row": (reindex(rows=1), "of 1 rows for .* too small"),
    "a huge block": (reindex(shape=[10**9, 4], rows=10**9), "too large"),
    "no rows": (reindex(rows=0), "has no blocks"),
    "more bytes than there are": (reindex(blocks=[[10**6, 0, 0]]), "describes .* bytes of frames"),
    "blocks of text": (reindex(blocks=["a"]), "has 1 blocks"),
    "no sha256": (reindex(base={"name": "a"}), "invalid base tensor"),
    "a base of another kind": (
        reindex(base={"name": "a", "dtype": "int8", "shape": [1], "sha256": ""}),
        "from a tensor of another kind",
    ),
    "a later version": (retell(version=2), "delta of version '2'"),
    "files that are a number": (retell(files=3), "does not list its files"),
    "a file elsewhere": (retell(files=["../delta.zst"]), "does not list its files"),
    "another count": (retell(tensors=4), "contains 3 tensors, expected 4"),
    "a file twice": (retell(files=["delta.zst", "delta.zst"]), "duplicate keys"),
}


@pytest.mark.parametrize(("damage", "reason"), BROKEN.values(), ids=BROKEN.keys())
def test_a_damaged_delta_is_refused(
    damage: Callable[[Path], Any], reason: str, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    extract_delta(*pair, tmp_path / "delta")
    damage(tmp_path / "delta")
    with pytest.raises(InputRefused, match=reason):
        apply_delta(pair[0], tmp_path / "delta", tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_a_frame_that_gives_other_rows_is_noticed(pair: tuple[Path, Path], tmp_path: Path) -> None:
    base, tuned = pair
    extract_delta(base, tuned, tmp_path / "delta")
    extract_delta(base, save(tmp_path / "third", weights(step=2e-4)), tmp_path / "other")
    content, foreign = frames(tmp_path / "delta").read_bytes(), frames(tmp_path / "other").read_bytes()
    size = int.from_bytes(content[-16:-8], "little")
    blocks = [one["blocks"] for one in json.loads(content[-16 - size : -16])["tensors"].values()]
    theirs = int.from_bytes(foreign[-16:-8], "little")
    index = json.loads(foreign[-16 - theirs : -16])
    for entry, own in zip(index["tensors"].values(), blocks, strict=True):
        entry["blocks"] = [[count[0], *block[1:]] for count, block in zip(entry["blocks"], own, strict=True)]
    write_index(tmp_path / "delta", foreign[: -24 - theirs], json.dumps(index).encode())
    with pytest.raises(MalformedInput, match="wrong checksum of the tuned rows"):
        apply_delta(base, tmp_path / "delta", tmp_path / "back")


@pytest.mark.slow
def test_truncated_at_any_place_it_is_refused_in_one_line(pair: tuple[Path, Path], tmp_path: Path) -> None:
    extract_delta(*pair, tmp_path / "delta")
    whole = frames(tmp_path / "delta").read_bytes()
    for size in range(0, len(whole), 7):
        frames(tmp_path / "delta").write_bytes(whole[:size])
        with pytest.raises(LlmconvError):
            apply_delta(pair[0], tmp_path / "delta", tmp_path / "back")
    assert not (tmp_path / "back").exists()


@pytest.mark.slow
def test_a_changed_byte_is_refused_or_has_no_effect(pair: tuple[Path, Path], tmp_path: Path) -> None:
    extract_delta(*pair, tmp_path / "delta")
    whole = frames(tmp_path / "delta").read_bytes()
    for place in range(0, len(whole), 5):
        frames(tmp_path / "delta").write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        try:
            apply_delta(pair[0], tmp_path / "delta", tmp_path / "back")
        except LlmconvError:
            continue
        back, tuned = (open_checkpoint(side) for side in (tmp_path / "back", pair[1]))
        assert [one[2] for one in contents(back).values()] == [one[2] for one in contents(tuned).values()]
        shutil.rmtree(tmp_path / "back")


def test_what_is_no_model_or_no_delta_is_told_apart(pair: tuple[Path, Path], tmp_path: Path) -> None:
    base, tuned = pair
    extract_delta(base, tuned, tmp_path / "delta")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/adapter_config.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: apply_delta(tmp_path / "delta", base, tmp_path / "out"), "is a delta, not a model"),
        (lambda: apply_delta(base, tmp_path / "adapter", tmp_path / "out"), "is an adapter"),
        (lambda: extract_delta(base, tmp_path / "adapter", tmp_path / "out"), "is an adapter, not a model"),
        (lambda: apply_delta(base, tmp_path / "empty", tmp_path / "out"), "is not a delta"),
        (lambda: apply_delta(base, tmp_path / "nothing", tmp_path / "out"), "does not exist"),
        (lambda: to_hf(tmp_path / "delta", tmp_path / "out"), "is a delta"),
    ]
    for call, reason in cases:
        with pytest.raises(InputRefused, match=reason):
            call()


def test_inspect_knows_a_delta(pair: tuple[Path, Path], tmp_path: Path) -> None:
    extract_delta(*pair, tmp_path / "delta")
    found = inspect(tmp_path / "delta")
    assert (found.format, found.parameters, found.config["model_type"]) == ("delta", 52, "llama")


@pytest.mark.parametrize("function", [apply_delta, extract_delta])
def test_an_impossible_dtype_is_a_usage_error(function: Any, pair: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(UsageProblem):
        function(*pair, tmp_path / "out", dtype="int8")


def test_two_models_that_share_nothing_get_a_warning(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    arguments = ["delta", "extract", str(tiny("llama")), str(tiny("gpt2")), "-o", str(tmp_path / "delta")]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0
    assert "(llama and gpt2): is it its base?" in done.stderr
