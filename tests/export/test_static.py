"""Static graphs: all axes fixed, the cache filled in place, and the outputs of the eager model."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from llmconv.errors import InputRefused, UnsupportedInput, UsageProblem
from llmconv.export import export
from llmconv.export.export_options import DEFAULTS, ExportOptions
from llmconv.export.families import INPUT_MAPS
from llmconv.export.graph_spec import graph_specs
from llmconv.output.manifest import read_manifest
from llmconv.runtime import OrtGraph, OrtRunner, default_positions
from llmconv.runtime.eager.runner import EagerRunner
from llmconv.tensors import Array
from llmconv.verify import verify
from tests.builders.mutants.surgery import add_constant, maker, users
from tests.conftest import CONFIGS

Tiny = Callable[[str], Path]
SIZES = {"shapes": "static", "batch_size": 3, "max_seq_len": 64, "prompt_len": 16}
QUICK = ("llama",)
WITH_POSITIONS = [name for name in CONFIGS if INPUT_MAPS[name].position_ids]
FAMILIES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in WITH_POSITIONS]


@pytest.fixture(scope="session")
def static(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """`static(model_type)` is a folder with weights, prefill.onnx and decode.onnx of fixed sizes."""
    folders: dict[str, Path] = {}

    def folder(model_type: str) -> Path:
        if model_type not in folders:
            folders[model_type] = tmp_path_factory.mktemp("static") / model_type
            shutil.copytree(tiny(model_type), folders[model_type])
            export(folders[model_type], **SIZES)  # type: ignore[arg-type]
        return folders[model_type]

    return folder


def prompt(rows: int, tokens: int) -> tuple[Array, Array, Array]:
    """Ids, mask and positions of a batch without padding."""
    mask = np.ones((rows, tokens), dtype=np.int64)
    return np.random.default_rng(0).integers(0, 96, mask.shape), mask, default_positions(mask, tokens)


@pytest.mark.one_row_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_scenario_that_fits_equals_the_eager_model(model_type: str, static: Tiny) -> None:
    report = verify(static(model_type))
    assert report.verdict == "pass", report.closing_lines()
    assert {check.graph for check in report.checks if check.name == "left padding" and check.verdict == "pass"} == {
        "prefill.onnx",
        "decode.onnx",
        "prefill.onnx+decode.onnx",
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", ["prefill.onnx", "decode.onnx"])
def test_no_axis_and_no_node_depends_on_a_call(name: str, static: Tiny) -> None:
    model = onnx.load(static("llama") / name, load_external_data=False)
    ports = [*model.graph.input, *model.graph.output]
    assert all(axis.HasField("dim_value") for port in ports for axis in port.type.tensor_type.shape.dim)
    assert not users(model, "Shape")


@pytest.mark.slow
def test_the_manifest_contains_the_sizes(static: Tiny) -> None:
    entries = read_manifest(static("llama")).graphs
    form = {"cache": "static", "batch_size": 3, "slots": 64}
    assert entries["decode"]["form"] == {**form, "sequence": 1}
    assert entries["prefill"]["form"] == {**form, "sequence": 16}


@pytest.mark.slow
def test_a_length_that_is_one_too_small_is_caught(static: Tiny, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(static("llama"), tmp_path / "mutant"))
    model = onnx.load(folder / "decode.onnx", load_external_data=False)
    length = maker(model, users(model, "Attention")[0].input[6])
    assert length is not None
    length.input[1] = add_constant(model, np.array([0], dtype=np.int64))
    onnx.save(model, folder / "decode.onnx")
    assert verify(folder, allow_changed=True).verdict == "fail"


@pytest.mark.slow
def test_a_write_one_slot_too_far_is_caught(static: Tiny, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(static("llama"), tmp_path / "mutant"))
    model = onnx.load(folder / "decode.onnx", load_external_data=False)
    one = add_constant(model, np.array([1], dtype=np.int64))
    model.graph.node.insert(0, onnx.helper.make_node("Add", ["write_indices", one], ["later"]))
    for scatter in users(model, "TensorScatter")[2:4]:
        scatter.input[2] = "later"
    onnx.save(model, folder / "decode.onnx")
    assert verify(folder, allow_changed=True).verdict == "fail"


@pytest.mark.slow
@pytest.mark.parametrize("what", ["a slot", "an attention length"])
def test_what_serves_all_rows_and_is_of_the_first_is_caught(what: str, static: Tiny, tmp_path: Path) -> None:
    """Such a graph is right while all rows have the same number of tokens, padding included."""
    folder = Path(shutil.copytree(static("llama"), tmp_path / "mutant"))
    model = onnx.load(folder / "decode.onnx", load_external_data=False)
    first = add_constant(model, np.array([0, 0, 0], dtype=np.int64))
    model.graph.node.insert(0, onnx.helper.make_node("Gather", ["write_indices", first], ["of_the_first"]))
    if what == "a slot":
        changed = users(model, "TensorScatter")
    else:
        changed = [node for node in model.graph.node if node.op_type == "Add" and "write_indices" in node.input]
    assert changed
    for node in changed:
        at = list(node.input).index("write_indices")
        node.input[at] = "of_the_first"
    onnx.save(model, folder / "decode.onnx")
    report = verify(folder, allow_changed=True, scenario=("left padding",))
    assert report.verdict == "fail", report.lines()


def test_a_fault_in_a_row_that_no_scenario_fills_is_caught(tiny: Tiny, tmp_path: Path) -> None:
    model_folder, folder = tiny("llama"), tmp_path / "out"
    export(model_folder, folder, prefill=False, incremental=True, shapes="static", batch_size=8, max_seq_len=64)
    model = onnx.load(folder / "decode.onnx", load_external_data=False)
    factors = add_constant(model, np.array([1.0] * 7 + [1.1], dtype=np.float32)[:, None, None])
    (logits,) = (node for node in model.graph.node if "logits" in node.output)
    logits.output[list(logits.output).index("logits")] = "before"
    model.graph.node.append(onnx.helper.make_node("Mul", ["before", factors], ["logits"]))
    onnx.save(model, folder / "decode.onnx")
    report = verify(folder, reference=model_folder, allow_changed=True, scenario=("prefill, 3 tokens",))
    failed = {check.name for check in report.checks if check.verdict == "fail"}
    assert "prefill, 3 tokens" in failed, report.lines()


@pytest.mark.slow
def test_rows_of_different_lengths_need_no_padding(static: Tiny) -> None:
    """Each row is written at its own index, as a server with one sequence per row does."""
    import onnxruntime  # noqa: PLC0415 - slow to import

    session = onnxruntime.InferenceSession(static("llama") / "decode.onnx", providers=["CPUExecutionProvider"])
    cache = {port.name: np.zeros(port.shape, np.float32) for port in session.get_inputs() if "past" in port.name}
    ids, _, _ = prompt(3, 4)
    mask = np.zeros((3, 64), dtype=np.int64)
    rows = np.arange(3)
    for step in range(4):
        write = np.minimum(step, rows + 1)  # row k has k + 2 tokens and repeats its last
        mask[rows, write] = 1
        feeds = {"input_ids": ids[rows, write][:, None], "attention_mask": mask, "position_ids": write[:, None]}
        logits, *present = session.run(None, {**feeds, "write_indices": write, **cache})
        cache = dict(zip(cache, present, strict=True))
    for row in rows:
        one, seen, at = (part[row : row + 1, : row + 2] for part in prompt(3, 4))
        alone = OrtRunner.from_folder(static("llama")).prefill(one, seen, at)
        np.testing.assert_allclose(logits[row, 0], alone.logits[0, -1], atol=1e-5)


@pytest.mark.slow
def test_prompts_longer_than_one_call_and_smaller_batches_give_the_same(static: Tiny, deep: Tiny) -> None:
    inputs = prompt(2, 37)
    step = OrtRunner.from_folder(static("llama")).prefill(*inputs)
    ids, mask, positions = (part[1:] for part in inputs)
    alone = OrtRunner.from_folder(static("llama")).prefill(ids, mask, positions)
    assert (step.logits.shape[:2], step.present.length) == ((2, 37), 37)
    np.testing.assert_allclose(step.logits[1], alone.logits[0], atol=1e-5)


def test_the_last_logits_of_a_padded_call_are_those_of_the_last_token(tiny: Tiny, tmp_path: Path) -> None:
    sizes = {**SIZES, "last_logits": True}
    export(tiny("llama"), tmp_path / "out", **sizes)  # type: ignore[arg-type]
    ids, mask, positions = prompt(3, 21)
    mask[0, :4], positions[0] = 0, default_positions(mask, 21)[0]
    last = OrtRunner.from_folder(tmp_path / "out").prefill(ids, mask, positions).logits
    assert last.shape[1] == 1
    np.testing.assert_allclose(
        last[:, 0], EagerRunner(tiny("llama")).prefill(ids, mask, positions).logits[:, -1], atol=1e-5
    )
    report = verify(tmp_path / "out", reference=tiny("llama"), scenario=("left padding", "prefill, 33 tokens"))
    assert report.verdict == "pass", report.lines()


@pytest.mark.slow
def test_the_cache_is_filled_in_place_and_a_fork_leaves_it_alone(static: Tiny) -> None:
    graph = OrtGraph(static("llama") / "decode.onnx")
    ids, mask, positions = prompt(1, 6)
    first = graph.run(ids[:, :4], mask[:, :4], positions[:, :4])
    second = graph.run(ids[:, 4:5], mask[:, :5], positions[:, 4:5], first.present)
    before = {name: array.copy() for name, array in second.present.arrays().items()}
    other = graph.run(ids[:, 5:6], mask[:, :5], positions[:, 4:5], first.present)
    assert second.present.buffers is first.present.buffers is not other.present.buffers  # type: ignore[attr-defined]
    for name, now in second.present.arrays().items():
        np.testing.assert_array_equal(before[name], now)


@pytest.mark.parametrize(("rows", "tokens"), [(4, 2), (1, 65)])
def test_a_call_beyond_the_sizes_is_refused(rows: int, tokens: int, static: Tiny) -> None:
    with pytest.raises(InputRefused, match=f"not {max(rows, tokens)}") as refusal:
        OrtGraph(static("llama") / "decode.onnx").run(*prompt(rows, tokens))
    assert "--max-seq-len" in refusal.value.hint


def test_a_family_that_counts_tokens_itself_is_refused(tiny: Tiny) -> None:
    with pytest.raises(UnsupportedInput, match="counts tokens itself") as refusal:
        export(tiny("bloom"), shapes="static", max_seq_len=64, dry_run=True)
    assert "shared-buffer" in refusal.value.hint


@pytest.mark.parametrize(
    ("shapes", "slots", "prompt_len"), [("static", None, None), ("static", 64, 24), ("dynamic", 64, None)]
)
def test_sizes_that_do_not_fit_are_refused(shapes: str, slots: int | None, prompt_len: int | None) -> None:
    sizes: ExportOptions = {"shapes": shapes, "batch_size": 1, "max_seq_len": slots, "prompt_len": prompt_len}
    with pytest.raises(UsageProblem):
        graph_specs(["prefill"], {**DEFAULTS, **sizes})


def test_the_default_prompt_length_divides_the_cache() -> None:
    sizes: ExportOptions = {"shapes": "static", "max_seq_len": 1000}
    assert graph_specs(["prefill"], {**DEFAULTS, **sizes})["prefill"].sequence == 125
