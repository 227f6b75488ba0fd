"""The strategy of a MindFormers run elsewhere: a file, a folder, or merged; wrong ones are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from llmconv.checkpoint import open_checkpoint
from llmconv.convert import from_hf, to_hf
from llmconv.convert.formats.mindformers.mindspore import ParallelLayout, read_strategy, strategy_bytes
from llmconv.errors import InputRefused, LlmconvError, MalformedInput, UsageProblem
from tests.builders.tiny_models import contents, save_tiny

Layouts = dict[str, ParallelLayout]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two ranks without a strategy next to them; the strategy is in `elsewhere`."""
    from_hf(save_tiny(tmp_path / "model", "llama"), tmp_path / "runs" / "one", to="mindformers", shards=2)
    (tmp_path / "runs/one/strategy").rename(tmp_path / "elsewhere")
    return tmp_path / "runs" / "one"


def layouts(folder: Path) -> Layouts:
    return read_strategy(folder / "elsewhere/ckpt_strategy_rank_0.ckpt")


@pytest.mark.parametrize("place", ["elsewhere", "elsewhere/ckpt_strategy_rank_1.ckpt"])
def test_a_folder_or_a_file_is_used(place: str, run: Path, tmp_path: Path) -> None:
    to_hf(run, tmp_path / "out", strategy=tmp_path / place)
    out, model = (contents(open_checkpoint(tmp_path / name)) for name in ("out", "model"))
    assert out == model


def test_a_merged_file_of_any_name_is_used(run: Path, tmp_path: Path) -> None:
    staged = {f"{number % 2}-{name}": layout for number, (name, layout) in enumerate(layouts(tmp_path).items())}
    (tmp_path / "all.ckpt").write_bytes(strategy_bytes(staged))
    to_hf(run, tmp_path / "out", strategy=tmp_path / "all.ckpt")
    assert contents(open_checkpoint(tmp_path / "out")) == contents(open_checkpoint(tmp_path / "model"))


def test_the_given_one_wins_over_one_next_to_the_ranks(run: Path, tmp_path: Path) -> None:
    (run / "strategy").mkdir()
    (run / "strategy/ckpt_strategy_rank_0.ckpt").write_bytes(b"")
    to_hf(run, tmp_path / "out", strategy=tmp_path / "elsewhere", dry_run=True)


def other_count(found: Layouts) -> Layouts:
    return {name: replace(layout, devices=(3,)) for name, layout in found.items()}


def not_divided(found: Layouts) -> Layouts:
    return {name: replace(layout, axes=tuple(() for _ in layout.axes)) for name, layout in found.items()}


def other_axes(found: Layouts) -> Layouts:
    return {name: replace(layout, axes=layout.axes[::-1]) for name, layout in found.items()}


def fewer_names(found: Layouts) -> Layouts:
    return {name: layout for name, layout in found.items() if "wq" not in name}


def contradiction(found: Layouts) -> Layouts:
    name = "model.norm_out.weight"
    return {**found, f"0-{name}": found[name], f"1-{name}": replace(found[name], devices=(3,))}


WRONG: dict[str, tuple[Callable[[Layouts], Layouts], str]] = {
    "of more ranks": (other_count, "has 2 ranks, but the strategy `.*other.ckpt` divides .* among 3"),
    "not divided": (not_divided, "joined by the strategy `.*other.ckpt`: .*shape"),
    "along other axes": (other_axes, "joined by the strategy `.*other.ckpt`: .*shape"),
    "of fewer tensors": (fewer_names, "strategy `.*other.ckpt` contains no layout for 2 tensors of `one`"),
    "of stages that differ": (contradiction, "stages in `other.ckpt` contradict each other for `1-model.norm_out"),
}


@pytest.mark.parametrize(("change", "reason"), WRONG.values(), ids=WRONG.keys())
def test_a_strategy_of_another_run_is_refused_by_name(
    change: Callable[[Layouts], Layouts], reason: str, run: Path, tmp_path: Path
) -> None:
    (tmp_path / "other.ckpt").write_bytes(strategy_bytes(change(layouts(tmp_path))))
    with pytest.raises(MalformedInput, match=reason):
        to_hf(run, tmp_path / "out", strategy=tmp_path / "other.ckpt")
    assert not (tmp_path / "out").exists()


def test_what_is_not_a_strategy_is_refused(run: Path, tmp_path: Path) -> None:
    wrong = {
        "model": "not a strategy file, and contains none",
        "runs/one/run.yaml": "is not a strategy file",
        "none": "does not exist",
    }
    for name, reason in wrong.items():
        with pytest.raises(LlmconvError, match=reason):
            to_hf(run, tmp_path / "out", strategy=tmp_path / name)


def test_a_checkpoint_that_is_not_divided_has_no_strategy(run: Path, tmp_path: Path) -> None:
    from_hf(tmp_path / "model", tmp_path / "whole", to="mindformers")
    with pytest.raises(UsageProblem, match="not divided into ranks"):
        to_hf(tmp_path / "whole", tmp_path / "out", strategy=tmp_path / "elsewhere")
    with pytest.raises(InputRefused, match="already is a Hugging Face"):
        to_hf(tmp_path / "model", tmp_path / "out", strategy=tmp_path / "elsewhere")


def test_a_scalar_has_one_part_where_the_optimizer_is_divided() -> None:
    layout = ParallelLayout((2, 2), (), step=2, size=2)
    assert layout.is_sound()
    assert [layout.coordinates_of(rank) for rank in range(4)] == [()] * 4
    assert layout.grid() == ()
