"""The method of a verification: which is chosen, which is refused, and what the command says."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from llmconv.cli import main
from llmconv.verify import float_folder as chosen
from llmconv.verify import verify
from tests.builders.layered_models import load, save, save_layered
from tests.verify.conftest import Tiny

ONE = ("--scenario", "prefill, 7 tokens", "--no-record")


def run(*arguments: object) -> Result:
    """The command's result."""
    return CliRunner().invoke(main, ["verify", *map(str, arguments)])


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama with one graph; do not write into it."""
    return save_layered("llama", tmp_path_factory.mktemp("method") / "llama")


@pytest.mark.slow
def test_a_small_model_is_run_whole(llama: Path) -> None:
    report = json.loads(run(llama, *ONE, "--json").stdout)
    assert (report["method"], report["verdict"]) == ("whole", "pass")
    assert "statements" not in report


@pytest.mark.slow
def test_a_large_model_is_shown_by_induction(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chosen, "WORTH_WAITING", 0.0)
    report = json.loads(run(llama, *ONE, "--json").stdout)
    assert (report["method"], report["verdict"]) == ("induction", "pass")
    assert any(note.startswith("by induction over layers: the whole model would take") for note in report["notes"])


@pytest.mark.quick_rows("options1")
@pytest.mark.parametrize("options", [("--bisect",), ("--repeat", "2"), ("--low-memory",)])
def test_options_that_need_the_whole_model_run_it(
    options: tuple[str, ...], llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chosen, "WORTH_WAITING", 0.0)
    result = run(llama, *ONE, *options, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["method"] == "whole"


@pytest.mark.slow
def test_structure_compares_no_numbers_and_says_so(llama: Path) -> None:
    result = run(llama, "--method", "structure", "--no-record")
    assert result.exit_code == 0, result.output
    assert (
        "PASS by structure" in result.stdout
        and "could not have found: wrong numbers (`--method induction` compares them)" in result.stdout
    )
    assert "SHOWN | structure | 4 layers of 1 class, alike node by node" in result.stdout


@pytest.mark.parametrize(
    "options",
    [
        ("--scenario", "prefill, 7 tokens"),
        ("--suite", "full"),
        ("--budget", "60s"),
        ("--repeat", "2"),
        ("--bisect",),
        ("--minimize", "piece"),
        ("--low-memory",),
    ],
)
def test_structure_excludes_options_of_runs(options: tuple[str, ...], llama: Path) -> None:
    result = run(llama, "--method", "structure", *options, "--no-record")
    assert result.exit_code == 2, result.output
    assert f"`--method structure` runs no graph, so it excludes `{options[0]}`" in result.stderr


def test_structure_that_is_not_found_is_inconclusive(llama: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(llama, tmp_path / "copy")
    model = load(folder)
    names = {"past_key_values.1.key": "past_key_values.2.key", "past_key_values.2.key": "past_key_values.1.key"}
    for node in model.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
    save(model, folder)
    result = run(folder, "--reference", llama, "--method", "structure", "--allow-changed", "--no-record")
    assert result.exit_code == 5, result.output
    assert "not shown: " in result.stdout


def test_equal_bytes_of_another_layer_fail(llama: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(llama, tmp_path / "copy")
    _equalize(folder)
    model = load(folder)
    names = [f"model.layers.{layer}.input_layernorm.weight" for layer in (1, 2)]
    one, other = (next(t for t in model.graph.initializer if t.name == name) for name in names)
    one.name, other.name = names[1], names[0]
    save(model, folder)
    result = run(folder, "--method", "structure", "--allow-changed", "--no-record")
    assert result.exit_code == 1, result.output
    assert f"`{names[0]}` maps the bytes of `{names[1]}`" in result.stdout


def _equalize(folder: Path) -> None:
    """Gives the norms of two layers the same values, in the same places."""
    from safetensors.torch import load_file, save_file  # noqa: PLC0415

    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.2.input_layernorm.weight"] = tensors["model.layers.1.input_layernorm.weight"].clone()
    save_file(tensors, path, {"format": "pt"})
    manifest = json.loads((folder / "llmconv.json").read_text())
    manifest.pop("files", None)
    (folder / "llmconv.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        (("--method", "induction", "--layers", "some"), "give `all`, `classes` or `sampled:K`, K at least 1"),
        (("--method", "induction", "--layers", "sampled:0"), "give `all`, `classes` or `sampled:K`, K at least 1"),
        (("--method", "whole", "--layers", "all"), "give `--method induction`"),
    ],
)
def test_bad_values_are_refused_with_a_hint(options: tuple[str, ...], hint: str, llama: Path) -> None:
    result = run(llama, *options)
    assert result.exit_code == 2
    assert f"hint: {hint}" in result.stderr


def test_graphs_without_a_folder_take_no_method(llama: Path) -> None:
    result = run("--graph", llama / "model.onnx", "--reference", llama, "--method", "induction")
    assert result.exit_code == 2
    assert "`--method` and `--layers` apply to FOLDER only" in result.stderr


def test_quantized_folders_take_a_method(llama: Path, tmp_path: Path) -> None:
    from llmconv.export.exporter import export  # noqa: PLC0415

    source = shutil.copytree(llama, tmp_path / "source")
    export(source, tmp_path / "int8", unified=True, quant="int8")
    for method in ("induction", "structure"):
        result = run(tmp_path / "int8", "--reference", llama, "--method", method)
        assert result.exit_code == 0 and f"by {method}" in result.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "why_not"),
    [
        ({"prefix": "PrefixTuning"}, "a graph has a prefix"),
    ],
)
def test_graphs_that_do_not_fall_into_layers_are_run_whole(
    options: dict[str, object], why_not: str, optioned: Tiny
) -> None:
    report = verify(optioned("llama", **options), method="induction", scenario=("prefill, 7 tokens",), record=False)
    assert (report.method, report.verdict) == ("whole", "pass")
    assert any(why_not in note for note in report.notes), report.notes


def test_stages_that_repeat_names_do_not_fail_by_structure(optioned: Callable[..., Path]) -> None:
    report = verify(optioned("llama", stages=2), method="structure", record=False)
    assert not [check for check in report.checks if check.verdict == "fail"]
    assert report.verdict == "pass"  # the stages compute the mask again, and their layers are alike nevertheless


@pytest.mark.slow
def test_graphs_with_the_last_logits_are_shown_by_induction(tmp_path: Path) -> None:
    folder = save_layered("llama", tmp_path / "last", last_logits=True)
    report = verify(folder, method="induction", scenario=("prefill, 7 tokens",), record=False)
    assert (report.method, report.verdict) == ("induction", "pass"), report.lines()
