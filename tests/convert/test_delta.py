"""Exact deltas: extract, then apply, is the tuned model bit for bit; any other base is refused before writing."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings

from llmconv.checkpoint import Checkpoint, open_checkpoint
from llmconv.cli import main
from llmconv.convert import apply_delta, extract_delta, from_hf, inspect, to_hf
from llmconv.errors import InputRefused, LlmconvError, MalformedInput, UnsupportedInput, UsageProblem
from llmconv.tensors import BY_NAME, DTYPES, LazyTensor, in_memory
from llmconv.writer import plan_checkpoint, write_checkpoint
from tests.convert.accessory_models import DELTA
from tests.convert.tiny_models import contents, save_tiny

CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": False}
Arrays = Mapping[str, tuple[str, Any]]


def save(folder: Path, arrays: Arrays, files: Mapping[str, bytes] | None = None, **config: Any) -> Path:
    """A model folder with tensors of given element types."""
    tensors = {name: in_memory(array, BY_NAME[dtype]) for name, (dtype, array) in arrays.items()}
    checkpoint = Checkpoint(folder, "hf", tensors, {**CONFIG, **config}, files or {})
    write_checkpoint(plan_checkpoint(checkpoint), folder, steps=[], sources=[])
    return folder


def weights(rows: int = 6, seed: int = 0, step: float = 0.0) -> dict[str, tuple[str, Any]]:
    """A model of three tensors, moved by `step` times noise."""
    rng, noise = np.random.default_rng(seed), np.random.default_rng(seed + 1)
    shapes = {"model.embed_tokens.weight": (rows, 4), "model.norm.weight": (4,), "lm_head.weight": (rows, 4)}
    arrays = {name: rng.standard_normal(shape) + step * noise.standard_normal(shape) for name, shape in shapes.items()}
    return {name: ("float32", array.astype(np.float32)) for name, array in arrays.items()}


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """A base and what was tuned from it."""
    return save(tmp_path / "base", weights()), save(tmp_path / "tuned", weights(step=1e-4))


def same(one: Path, other: Path) -> bool:
    """Whether two folders hold the same model: tensors, their order, config and side files."""
    left, right = open_checkpoint(one), open_checkpoint(other)
    told = [(list(side), contents(side), side.config, dict(side.side_files)) for side in (left, right)]
    return told[0] == told[1]


def there_and_back(base: Path, tuned: Path, folder: Path, **options: Any) -> Path:
    extract_delta(base, tuned, folder / "delta", **options)
    apply_delta(base, folder / "delta", folder / "back")
    return folder / "back"


# Every pair of models


def shapes() -> st.SearchStrategy[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Two shapes, often equal, often with more or fewer rows."""
    shape = st.lists(st.integers(0, 5), max_size=3).map(tuple)
    rows = st.tuples(shape, st.integers(0, 9), st.integers(0, 9))
    return st.one_of(
        shape.map(lambda one: (one, one)),
        st.tuples(shape, shape),
        rows.map(lambda one: ((one[1], *one[0]), (one[2], *one[0]))),
    )


@st.composite
def tensors(draw: st.DrawFn) -> tuple[tuple[str, Any], tuple[str, Any]]:
    """A tensor of the base and of the tuned model: any types, any shapes, any bits, or few bits apart."""
    kinds = st.sampled_from([dtype.name for dtype in DTYPES])
    before = draw(kinds)
    after = draw(st.one_of(st.just(before), kinds))
    sides = []
    for name, shape in zip((before, after), draw(shapes()), strict=True):
        size = int(np.prod(shape)) * BY_NAME[name].itemsize
        bits: Any = np.frombuffer(draw(st.binary(min_size=size, max_size=size)), np.uint8)
        bits = bits & 1 if name == "bool" else bits
        sides.append((name, np.ascontiguousarray(bits).view(BY_NAME[name].numpy).reshape(shape)))
    if before == after and sides[0][1].shape == sides[1][1].shape and draw(st.booleans()):
        sides[1] = sides[0]
    return sides[0], sides[1]


MODELS = st.dictionaries(
    st.sampled_from(["model.embed_tokens.weight", "lm_head.weight", "a.weight", "b.bias", "c"]),
    st.tuples(tensors(), st.sampled_from(["both", "both", "added", "removed"])),
    min_size=1,
)


@settings(max_examples=60, deadline=None)
@given(MODELS)
def test_any_two_models_have_a_delta_that_leads_from_one_to_the_other(models: Mapping[str, Any]) -> None:
    below = {name: one for name, ((one, _), fate) in models.items() if fate != "added"}
    above = {name: other for name, ((_, other), fate) in models.items() if fate != "removed"}
    few = {"model.norm.weight": ("bfloat16", np.zeros(3, BY_NAME["bfloat16"].numpy))}
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(LazyTensor.blocks, "__defaults__", (24,))
        base, tuned = save(Path(folder, "base"), below | few), save(Path(folder, "tuned"), above | few)
        assert same(there_and_back(base, tuned, Path(folder), max_shard_size=64), tuned)


@pytest.mark.parametrize("before", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("after", ["float32", "float16", "bfloat16"])
def test_what_is_no_number_comes_back_in_every_type(before: str, after: str, tmp_path: Path) -> None:
    odd = np.array([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, 3e38, 65520.0, -1.5], np.float32)
    with np.errstate(all="ignore"):
        sides = [odd.astype(BY_NAME[dtype].numpy) for dtype in (before, after)]
    base = save(tmp_path / "base", {"model.norm.weight": (before, sides[0])})
    tuned = save(tmp_path / "tuned", {"model.norm.weight": (after, np.roll(sides[1], 3))})
    assert same(there_and_back(base, tuned, tmp_path), tuned)


def test_config_tokenizer_and_vocabulary_are_the_tuned_models(tmp_path: Path) -> None:
    base = save(tmp_path / "base", weights(), {"tokenizer.json": b"{}", "vocab.json": b"{}"}, vocab_size=6)
    tuned = save(tmp_path / "tuned", weights(9), {"tokenizer.json": b'{"a": 1}'}, vocab_size=9, rope_theta=1e6)
    back = there_and_back(base, tuned, tmp_path)
    assert same(back, tuned)
    assert (back / "config.json").read_bytes() == (tuned / "config.json").read_bytes()


def test_a_head_that_was_the_embedding_is_told_from_it(tmp_path: Path) -> None:
    tied = {name: one for name, one in weights(2000).items() if name != "lm_head.weight"}
    untied = tied | {"lm_head.weight": tied["model.embed_tokens.weight"]}
    base, tuned = save(tmp_path / "base", tied, tie_word_embeddings=True), save(tmp_path / "tuned", untied)
    extracted = extract_delta(base, tuned, tmp_path / "delta")
    assert extracted.nbytes is not None and extracted.nbytes < 2000
    apply_delta(base, tmp_path / "delta", tmp_path / "back")
    assert same(tmp_path / "back", tuned)


def test_what_did_not_change_takes_no_room_and_small_moves_take_little(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    kind = BY_NAME["bfloat16"].numpy
    base = (0.02 * rng.standard_normal((400, 256))).astype(kind)
    tuned = (base.astype(np.float32) + 2e-5 * rng.standard_normal(base.shape)).astype(kind)
    sides = {
        name: save(tmp_path / name, {"a.weight": ("bfloat16", one)})
        for name, one in zip("bt", (base, tuned), strict=True)
    }
    moved = extract_delta(sides["b"], sides["t"], tmp_path / "moved").nbytes
    still = extract_delta(sides["b"], sides["b"], tmp_path / "still").nbytes
    assert moved is not None and still is not None
    assert moved < 0.25 * base.nbytes and still < 500


def test_the_bases_may_be_of_other_formats(tmp_path: Path) -> None:
    extract_delta(DELTA / "base", DELTA / "finetuned", tmp_path / "delta")
    to_hf(DELTA / "base", tmp_path / "base")
    to_hf(DELTA / "finetuned", tmp_path / "tuned")
    apply_delta(tmp_path / "base", tmp_path / "delta", tmp_path / "back")
    assert same(tmp_path / "back", tmp_path / "tuned")


def test_a_models_own_shards_make_no_difference(tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base", "llama")
    from_hf(base, tmp_path / "meta", to="meta", shards=2)
    tuned = save_tiny(tmp_path / "tuned", "llama", "bfloat16")
    extract_delta(tmp_path / "meta", tuned, tmp_path / "delta", max_shard_size="4KB")
    apply_delta(base, tmp_path / "delta", tmp_path / "back", max_shard_size="9KB")
    assert same(tmp_path / "back", tuned)
    assert len(list((tmp_path / "delta").glob("*.zst"))) > 3


def test_another_dtype_is_a_rounding_of_the_tuned_model(pair: tuple[Path, Path], tmp_path: Path) -> None:
    base, tuned = pair
    extract_delta(base, tuned, tmp_path / "delta")
    apply_delta(base, tmp_path / "delta", tmp_path / "back", dtype="bfloat16")
    extract_delta(base, tuned, tmp_path / "small", dtype="bfloat16")
    apply_delta(base, tmp_path / "small", tmp_path / "other")
    expected = open_checkpoint(tuned)["model.norm.weight"].read().astype(BY_NAME["bfloat16"].numpy)
    for folder in ("back", "other"):
        checkpoint = open_checkpoint(tmp_path / folder)
        assert checkpoint["model.norm.weight"].read().tobytes() == expected.tobytes()
        assert checkpoint.config["torch_dtype"] == "bfloat16"


# The wrong base


def test_another_base_is_refused_by_name_before_anything_is_written(pair: tuple[Path, Path], tmp_path: Path) -> None:
    base, tuned = pair
    extract_delta(base, tuned, tmp_path / "delta")
    arrays = weights()
    arrays["model.norm.weight"][1][2] += 1e-6
    other = save(tmp_path / "other", arrays)
    with pytest.raises(InputRefused, match=r"1 of 3 tensors have other values: `model\.norm\.weight`") as refusal:
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
        (lambda arrays: arrays.pop("lm_head.weight"), r"it lacks 1 tensors: `lm_head\.weight`"),
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


# Damage


def frames(folder: Path) -> Path:
    return folder / "delta.zst"


def flip(folder: Path) -> None:
    content = bytearray(frames(folder).read_bytes())
    content[20] ^= 1
    frames(folder).write_bytes(content)


def cut(folder: Path) -> None:
    frames(folder).write_bytes(frames(folder).read_bytes()[:-1])


def reindex(**changes: Any) -> Callable[[Path], None]:
    """Changes fields of the first tensor's entry."""

    def damage(folder: Path) -> None:
        content = frames(folder).read_bytes()
        size = int.from_bytes(content[-16:-8], "little")
        index = json.loads(content[-16 - size : -16])
        next(iter(index["tensors"].values())).update(changes)
        write_index(folder, content[: -24 - size], json.dumps(index).encode())

    return damage


def write_index(folder: Path, before: bytes, text: bytes) -> None:
    tail = len(text).to_bytes(8, "little") + b"LLMDELTA"
    head = (0x184D2A5E).to_bytes(4, "little") + (len(text) + 16).to_bytes(4, "little")
    frames(folder).write_bytes(before + head + text + tail)


def retell(**changes: Any) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        content = json.loads((folder / "delta.json").read_text()) | changes
        (folder / "delta.json").write_text(json.dumps(content))

    return damage


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
    "another shape": (reindex(shape=[10**9, 4]), "1 blocks for .* its shape needs"),
    "a huge block": (reindex(shape=[10**9, 4], rows=10**9), "too large"),
    "no rows": (reindex(rows=0), "has no blocks"),
    "more bytes than there are": (reindex(blocks=[[10**6, 0]]), "describes .* bytes of frames"),
    "blocks of text": (reindex(blocks=["a"]), "has 1 blocks"),
    "no sha256": (reindex(base={"name": "a"}), "does not say what"),
    "a base of another kind": (
        reindex(base={"name": "a", "dtype": "int8", "shape": [1], "sha256": ""}),
        "from a tensor of another kind",
    ),
    "a later version": (retell(version=2), "delta of version '2'"),
    "files that are a number": (retell(files=3), "does not list its files"),
    "a file elsewhere": (retell(files=["../delta.zst"]), "does not list its files"),
    "another count": (retell(tensors=4), "holds 3 tensors, `delta.json` says 4"),
    "a file twice": (retell(files=["delta.zst", "delta.zst"]), "repeats"),
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
        entry["blocks"] = [[count[0], block[1]] for count, block in zip(entry["blocks"], own, strict=True)]
    write_index(tmp_path / "delta", foreign[: -24 - theirs], json.dumps(index).encode())
    with pytest.raises(MalformedInput, match="does not give the rows that it was made from"):
        apply_delta(base, tmp_path / "delta", tmp_path / "back")


# What is no model, and what is no delta


def test_what_is_no_model_or_no_delta_is_told_apart(pair: tuple[Path, Path], tmp_path: Path) -> None:
    base, tuned = pair
    extract_delta(base, tuned, tmp_path / "delta")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/adapter_config.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: apply_delta(tmp_path / "delta", base, tmp_path / "out"), "is a delta, no model"),
        (lambda: apply_delta(base, tmp_path / "adapter", tmp_path / "out"), "is an adapter"),
        (lambda: extract_delta(base, tmp_path / "adapter", tmp_path / "out"), "is an adapter, no model"),
        (lambda: apply_delta(base, tmp_path / "empty", tmp_path / "out"), "is no delta"),
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


# The way it writes


def test_a_dry_run_writes_nothing(pair: tuple[Path, Path], tmp_path: Path) -> None:
    assert extract_delta(*pair, tmp_path / "delta", dry_run=True).nbytes is None
    extract_delta(*pair, tmp_path / "delta")
    applied = apply_delta(pair[0], tmp_path / "delta", tmp_path / "back", dry_run=True)
    assert applied.kind == "exact" and not (tmp_path / "back").exists()


def test_an_output_is_replaced_on_demand_only(pair: tuple[Path, Path], tmp_path: Path) -> None:
    extract_delta(*pair, tmp_path / "delta")
    with pytest.raises(InputRefused, match="already exists"):
        extract_delta(*pair, tmp_path / "delta")
    extract_delta(pair[1], pair[0], tmp_path / "delta", overwrite=True)
    apply_delta(pair[1], tmp_path / "delta", tmp_path / "back")
    assert same(tmp_path / "back", pair[0])


def test_the_manifest_tells_the_steps_and_the_same_bytes_come_out_twice(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    for number in ("1", "2"):
        extract_delta(*pair, tmp_path / number)
    assert frames(tmp_path / "1").read_bytes() == frames(tmp_path / "2").read_bytes()
    (done,) = json.loads((tmp_path / "1/llmconv.json").read_text())["steps"]
    assert (done["command"], done["source"], done["options"]) == ("delta-extract", "base", {"tuned": "tuned"})


KILLED = """
import os, signal, sys
from llmconv.convert import apply_delta, extract_delta
calls, sync = [], os.fsync
def counted(fd):
    sync(fd)
    calls.append(fd)
    if len(calls) == 6:
        os.kill(os.getpid(), signal.SIGKILL)
os.fsync = counted
{"apply": apply_delta, "extract": extract_delta}[sys.argv[1]](*sys.argv[2:], max_shard_size=100)
"""
"""Dies when the second or third file is being finished."""


@pytest.mark.parametrize("way", ["extract", "apply"])
def test_a_killed_run_goes_on_where_it_was(way: str, pair: tuple[Path, Path], tmp_path: Path) -> None:
    extract_delta(*pair, tmp_path / "delta", max_shard_size=100)
    sides = [str(side) for side in (pair if way == "extract" else (pair[0], tmp_path / "delta"))]
    out = tmp_path / "out"
    done = subprocess.run([sys.executable, "-c", KILLED, way, *sides, out], check=False)
    first = next((tmp_path / ".out.llmconv-partial").glob("*-00001-of-*"))
    before = first.stat().st_mtime_ns
    assert done.returncode == -signal.SIGKILL and not out.exists()
    function: Any = extract_delta if way == "extract" else apply_delta
    function(*sides, out, max_shard_size=100, resume=True)
    assert (out / first.name).stat().st_mtime_ns == before
    if way == "extract":
        apply_delta(pair[0], out, tmp_path / "back")
    assert same(tmp_path / "back" if way == "extract" else out, pair[1])


# The command line


def run(*arguments: object) -> Any:
    return CliRunner().invoke(main, ["delta", *map(str, arguments)])


def test_the_commands_say_what_they_did(pair: tuple[Path, Path], tmp_path: Path) -> None:
    made = run("extract", *pair, "-o", tmp_path / "delta")
    assert made.exit_code == 0 and "as exact delta" in made.stdout
    size = (tmp_path / "delta/delta.zst").stat().st_size
    told = json.loads(run("extract", *pair, "-o", tmp_path / "again", "--json").stdout)
    assert (told["kind"], told["delta_bytes"], told["tensors"]) == ("exact", size, 3)
    shown = run("apply", pair[0], tmp_path / "delta", "-o", tmp_path / "back", "--dry-run")
    assert "would write" in shown.stdout and "model.norm.weight" in shown.stdout
    back = json.loads(run("apply", pair[0], tmp_path / "delta", "-o", tmp_path / "back", "--json").stdout)
    assert (back["kind"], back["written"], back["files"]) == ("exact", True, ["model.safetensors"])


def test_a_wrong_base_is_a_refusal_with_a_hint(pair: tuple[Path, Path], tmp_path: Path) -> None:
    run("extract", *pair, "-o", tmp_path / "delta")
    done = run("apply", pair[1], tmp_path / "delta", "-o", tmp_path / "back")
    assert done.exit_code == 3
    assert done.stderr.startswith("error: the base is not the one") and "\n\nhint: " in done.stderr


def test_truncated_at_any_place_it_is_refused_in_one_line(pair: tuple[Path, Path], tmp_path: Path) -> None:
    extract_delta(*pair, tmp_path / "delta")
    whole = frames(tmp_path / "delta").read_bytes()
    for size in range(0, len(whole), 7):
        frames(tmp_path / "delta").write_bytes(whole[:size])
        with pytest.raises(LlmconvError):
            apply_delta(pair[0], tmp_path / "delta", tmp_path / "back")
    assert not (tmp_path / "back").exists()


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


def test_quantized_models_have_an_exact_delta_and_no_sum(pair: tuple[Path, Path], tmp_path: Path) -> None:
    packed = {"a.qweight": ("int32", np.arange(6, dtype=np.int32).reshape(2, 3))}
    base = save(tmp_path / "q", packed, quantization_config={"bits": 4})
    tuned = save(tmp_path / "p", {"a.qweight": ("int32", packed["a.qweight"][1] * 7)}, quantization_config={"bits": 4})
    assert same(there_and_back(base, tuned, tmp_path), tuned)
    with pytest.raises(UnsupportedInput, match="quantized"):
        apply_delta(base, tuned, tmp_path / "sum")
