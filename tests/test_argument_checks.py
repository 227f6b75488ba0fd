"""Arguments of public functions are checked against their annotations: a value of another type is refused."""

from __future__ import annotations

import inspect as python_inspect
import subprocess
import sys
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack

import numpy as np
import pytest
from click.testing import CliRunner

import llmconv
import llmconv.bench
import llmconv.convert
import llmconv.export
import llmconv.generation
import llmconv.verify
from llmconv.argument_checks import checked
from llmconv.bench.bench import BenchResult, Measurement
from llmconv.checkpoint import open_checkpoint
from llmconv.cli import main
from llmconv.errors import LlmconvError, UsageProblem
from llmconv.runtime import SessionSettings

CHECKPOINT = Path(__file__).parents[1] / "examples/tiny-llama/ep4-ba2400-rank0.pt"


class More(TypedDict, total=False):
    weights: Sequence[float]


@checked
def example(  # noqa: PLR0913 - one of each kind
    path: str | Path,
    several: Sequence[str | Path] = (),
    *,
    size: int | None = None,
    share: float = 0.5,
    word: str = "",
    flag: bool = False,
    settings: SessionSettings | None = None,
    callback: Callable[[str], object] | None = None,
    limit: str | int = 1,
    **more: Unpack[More],
) -> dict[str, Any]:
    """Returns its arguments."""
    return {"path": path, "several": several, "size": size, "share": share, "word": word, "flag": flag, **more}


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"path": 3}, "`path` is an int, not a path"),
        ({"path": None}, "`path` is None"),
        ({"path": ["a"]}, "`path` is a list"),
        ({"path": b"a"}, "`path` is a bytes"),
        ({"path": ""}, "`path` is empty"),
        ({"several": {"a", "b"}}, "a set has no order"),
        ({"several": [3]}, r"`several\[0\]` is an int"),
        ({"size": "3"}, r"`size` is a str \('3'\), not an integer"),
        ({"size": 2.0}, "`size` is a float"),
        ({"size": True}, "`size` is a bool"),
        ({"share": "0.5"}, "`share` is a str"),
        ({"share": True}, "`share` is a bool"),
        ({"word": 3}, "`word` is an int"),
        ({"word": b"a"}, "`word` is a bytes"),
        ({"flag": "false"}, r"`flag` is a str \('false'\), not True or False"),
        ({"flag": 1}, "`flag` is an int"),
        ({"settings": {"threads": 1}}, "`settings` is a dict, not a `SessionSettings`"),
        ({"callback": "print"}, "`callback` is a str"),
        ({"limit": 1.5}, "`limit` is a float"),
        ({"weights": "0.5"}, r"`weights\[0\]` is a str|`weights` is a str"),
        ({"weights": [True]}, r"`weights\[0\]` is a bool"),
    ],
)
def test_a_value_of_another_type_is_named(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageProblem, match=problem):
        example(**{"path": "a", **given})


def test_numbers_of_numpy_become_plain_ones() -> None:
    given: dict[str, Any] = {"size": np.int64(3), "share": np.float32(0.5), "flag": np.bool_(True)}
    found = example("a", **given)
    assert [type(found[name]) for name in ("size", "share", "flag")] == [int, float, bool]


@pytest.mark.parametrize("given", ["a", ["a"], ("a",), iter(["a"])], ids=["one", "list", "tuple", "iterator"])
def test_one_value_stands_for_a_list_of_it(given: Any) -> None:
    assert example("a", given)["several"] == ("a",)


def test_one_number_stands_for_a_list_of_it() -> None:
    given: Any = 0.5
    assert example("a", weights=given)["weights"] == (0.5,)


ROOMS = [llmconv.convert, llmconv.export, llmconv.verify, llmconv.bench, llmconv.generation]
PUBLIC = [
    pytest.param(getattr(room, name), id=name)
    for room in ROOMS
    for name in room.__all__
    if python_inspect.isfunction(getattr(room, name))
]


@pytest.mark.parametrize("function", PUBLIC)
def test_the_annotations_of_every_public_function_can_be_read(function: Any) -> None:
    assert typing.get_type_hints(function, include_extras=True)


class Model:
    """An open model, as far as its class shows."""

    def save_pretrained(self, folder: str) -> None:
        """As of transformers."""


OPEN: Any = Model()

CALLS: dict[str, Callable[[Any, Path], Any]] = {
    "inspect": lambda model, out: llmconv.convert.inspect(model),
    "to_hf": lambda model, out: llmconv.convert.to_hf(model, out),
    "to_hf, base": lambda model, out: llmconv.convert.to_hf("x", out, base=model),
    "from_hf": lambda model, out: llmconv.convert.from_hf(model, out, to="meta"),
    "to_gguf": lambda model, out: llmconv.to_gguf(model, out / "x.gguf"),
    "importance_matrix": lambda model, out: llmconv.compressed.importance_matrix(model, out / "x.gguf"),
    "quantize": lambda model, out: llmconv.quantize(model, out, scheme="w8a8"),
    "merge_lora": lambda model, out: llmconv.convert.merge_lora(model, "x", out),
    "merge_lora, adapter": lambda model, out: llmconv.convert.merge_lora("x", model, out),
    "apply_delta": lambda model, out: llmconv.convert.apply_delta(model, "x", out),
    "extract_delta": lambda model, out: llmconv.convert.extract_delta("x", model, out),
    "export": lambda model, out: llmconv.export.export(model, out),
    "verify": lambda model, out: llmconv.verify.verify(model),
    "verify, reference": lambda model, out: llmconv.verify.verify("x", reference=model),
    "verify_graphs": lambda model, out: llmconv.verify.verify_graphs(model),
    "generate": lambda model, out: llmconv.generation.generate(model, "x"),
    "TextModel": lambda model, out: llmconv.generation.TextModel.open(model),
    "pipeline": lambda model, out: llmconv.pipeline(model=model),
    "bench": lambda model, out: llmconv.bench.bench(model),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_an_open_model_in_the_place_of_a_folder_is_named_with_the_way_out(
    call: Callable[[Any, Path], Any], tmp_path: Path
) -> None:
    with pytest.raises(UsageProblem, match="is a Model") as caught:
        call(OPEN, tmp_path / "out")
    assert "save_pretrained(FOLDER)" in caught.value.hint
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("value", [None, 3, b"x", "", {"a": 1}], ids=str)
def test_a_value_that_is_not_a_path_is_a_clear_error_everywhere(
    call: Callable[[Any, Path], Any], value: Any, tmp_path: Path
) -> None:
    with pytest.raises(LlmconvError):
        call(value, tmp_path / "out")


def test_the_public_names_are_those_that_are_meant() -> None:
    assert dir(llmconv.convert) == sorted(llmconv.convert.__all__)
    assert "importlib" not in dir(llmconv)
    for room in (llmconv, *ROOMS):
        assert all(hasattr(room, name) for name in dir(room))


@pytest.mark.slow
def test_the_rooms_are_there_once_the_package_is(tmp_path: Path) -> None:
    code = "import llmconv; print(llmconv.convert.to_hf.__name__, llmconv.export.export.__name__)"
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert made.stdout.split() == ["to_hf", "export"]


@pytest.mark.parametrize("check", [llmconv.verify.verify, llmconv.verify.verify_graphs])
@pytest.mark.parametrize(
    ("limit", "value"),
    [
        *(("max_divergence", value) for value in (float("nan"), float("inf"), -1.0)),
        *(("min_agreement", value) for value in (float("nan"), 2.0, -0.5)),
    ],
)
def test_a_limit_out_of_its_range_is_refused(check: Callable[..., Any], limit: str, value: float) -> None:
    with pytest.raises(UsageProblem, match=f"`{limit}` is {value}"):
        check("missing.onnx", **{limit: value})


def test_results_are_one_short_line(tmp_path: Path) -> None:
    base, merged = tmp_path / "base", tmp_path / "merged"
    results = [
        llmconv.convert.to_hf(CHECKPOINT, base),
        llmconv.convert.merge_lora(base, CHECKPOINT.parent / "adapter", merged),
        llmconv.convert.from_hf(base, tmp_path / "meta", to="meta"),
        llmconv.convert.extract_delta(base, merged, tmp_path / "delta"),
        llmconv.convert.apply_delta(base, tmp_path / "delta", tmp_path / "again"),
        llmconv.convert.inspect(base),
        open_checkpoint(base),
        llmconv.verify.Report("a", "b", "quick", notes=["note"] * 1000),
        BenchResult(["a", "b"], {}, [Measurement("a", 1, 8)] * 100, 1, 1, 1),
    ]
    for result in results:
        assert "\n" not in repr(result)
        assert len(repr(result)) < 100 + 2 * len(str(tmp_path)), repr(result)
    assert "llama: 29 tensors" in repr(results[0])


SHARDED: dict[str, Callable[[Path, Any], Any]] = {
    "to_hf": lambda out, size: llmconv.convert.to_hf(CHECKPOINT, out, max_shard_size=size),
    "merge_lora": lambda out, size: llmconv.convert.merge_lora("b", "a", out, max_shard_size=size),
    "apply_delta": lambda out, size: llmconv.convert.apply_delta("b", "d", out, max_shard_size=size),
    "extract_delta": lambda out, size: llmconv.convert.extract_delta("b", "t", out, max_shard_size=size),
    "extract_delta, rank": lambda out, size: llmconv.convert.extract_delta("b", "t", out, rank=1, max_shard_size=size),
    "export": lambda out, size: llmconv.export.export("m", out, max_shard_size=size),
}


@pytest.mark.parametrize("call", SHARDED.values(), ids=SHARDED)
@pytest.mark.parametrize("size", [0, -1, "0", "-5GB", ""])
def test_an_impossible_shard_size_is_refused_before_anything_is_read(
    call: Callable[[Path, Any], Any], size: str | int, tmp_path: Path
) -> None:
    with pytest.raises(UsageProblem, match=f"invalid size `{size}`"):
        call(tmp_path / "out", size)
    assert not [*tmp_path.iterdir()]


def test_every_function_with_a_shard_size_is_among_them() -> None:
    found = {
        function.__name__
        for function in (getattr(room, name) for room in ROOMS for name in room.__all__)
        if python_inspect.isfunction(function) and "max_shard_size" in python_inspect.signature(function).parameters
    }
    assert found | {"merge_lora", "export"} == {name.partition(",")[0] for name in SHARDED}


WORDS: dict[str, Callable[[Path], Any]] = {
    "qkv_layout": lambda out: llmconv.convert.to_hf(CHECKPOINT, out, qkv_layout="joined"),
    "adapter": lambda out: llmconv.convert.to_hf(CHECKPOINT, out, adapter="merged"),
    "dtype": lambda out: llmconv.convert.to_hf(CHECKPOINT, out, dtype="int8"),
    "shards": lambda out: llmconv.convert.from_hf("x", out, to="meta", shards=-2),
    "repeat": lambda out: llmconv.verify.verify_graphs("missing.onnx", repeat=0),
    "lengths": lambda out: llmconv.bench.bench(str(CHECKPOINT.parent), lengths=-1),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("call", WORDS.values(), ids=WORDS)
def test_invalid_words_and_numbers_are_refused(call: Callable[[Path], Any], tmp_path: Path) -> None:
    with pytest.raises(UsageProblem):
        call(tmp_path / "out")
    assert not [*tmp_path.iterdir()]


VERIFY: Callable[..., object] = llmconv.verify.verify
MERGE_LORA: Callable[..., object] = llmconv.convert.merge_lora


@pytest.mark.parametrize(
    ("call", "problem", "hint"),
    [
        (lambda: VERIFY(".", scenarios="left padding"), "`verify` has no parameter `scenarios`", "`scenario`"),
        (
            lambda: MERGE_LORA(".", ".", "x", weight=2),
            "`merge_lora` has no parameter `weight`",
            "weights",
        ),
    ],
    ids=["verify", "merge_lora"],
)
def test_an_unknown_parameter_is_named_with_the_near_one(call: Callable[[], object], problem: str, hint: str) -> None:
    with pytest.raises(UsageProblem, match=problem) as caught:
        call()
    assert hint in caught.value.hint


@pytest.mark.slow_rows("fp16-float16")
@pytest.mark.parametrize(("short", "name"), [("fp32", "float32"), ("fp16", "float16"), ("bf16", "bfloat16")])
def test_the_short_name_of_an_element_type_is_the_full_one(short: str, name: str, tmp_path: Path) -> None:
    plan = llmconv.convert.to_hf(CHECKPOINT, tmp_path / "out", dtype=short, dry_run=True)
    assert {tensor.dtype.name for shard in plan.shards for tensor in shard.tensors.values()} == {name}
    line = ["to-hf", str(CHECKPOINT), "-o", str(tmp_path / "out"), "--dtype", short, "--dry-run"]
    done = CliRunner().invoke(main, line)
    assert done.exit_code == 0 and f"  {name}  [" in done.output
