"""A folder that has neither graphs nor a model is refused with the command that makes a model of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from llmconv.cli import main
from llmconv.convert import extract_delta, from_hf, merge_lora, to_hf
from llmconv.errors import InputRefused
from llmconv.verify import verify

EXAMPLE = Path(__file__).parents[2] / "examples/tiny-llama"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`base` and `tuned`, and what llmconv makes of them that is not a model: `delta`, `lora` and `meta`."""
    folder = tmp_path_factory.mktemp("made")
    to_hf(EXAMPLE / "ep4-ba2400-rank0.pt", folder / "base")
    merge_lora(folder / "base", EXAMPLE / "adapter", folder / "tuned")
    extract_delta(folder / "base", folder / "tuned", folder / "delta")
    extract_delta(folder / "base", folder / "tuned", folder / "lora", rank=1)
    from_hf(folder / "base", folder / "meta", to="meta")
    return folder


@pytest.mark.parametrize(
    ("name", "problem", "hint"),
    [
        ("delta", "is a delta, not a model", "llmconv delta apply BASE {0} -o OUT"),
        ("lora", "is an adapter of `base`, not a model", "llmconv merge-lora BASE {0} -o OUT"),
        ("meta", "contains a torch checkpoint", "llmconv to-hf {0} -o OUT"),
    ],
)
def test_folders_of_llmconv_that_are_not_models_are_refused_with_the_next_command(
    made: Path, name: str, problem: str, hint: str
) -> None:
    with pytest.raises(InputRefused, match=problem) as caught:
        verify(made / name)
    assert hint.format(made / name) in caught.value.hint


def test_the_command_exits_with_3(made: Path) -> None:
    done = CliRunner().invoke(main, ["verify", str(made / "delta")])
    assert done.exit_code == 3 and "hint: use `llmconv delta apply" in done.stderr


def test_a_model_without_graphs_gets_the_hint_to_export_them(made: Path) -> None:
    with pytest.raises(InputRefused, match="no graphs in") as caught:
        verify(made / "base")
    assert f"make them: `llmconv export {made / 'base'}`" in (caught.value.hint or "")
