"""Families with extra inputs: exported and verified in every form, misfits said in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest

from llmconv.errors import UnsupportedInput, UsageProblem
from llmconv.export import BATCH, PAST, SEQUENCE, TOTAL, ExtraInput, InputMap, export, register_input_map
from llmconv.export.families import INPUT_MAPS
from llmconv.export.graph_spec import refuse_option
from llmconv.export.input_map import Port
from llmconv.export.tracing.trace import example_arguments
from llmconv.verify import verify
from tests.builders.spiced_models import FILLED, LANGUAGE, SPICE, WEIGHTS, save_spice, wrong_shape
from tests.builders.tracing import trace_once

trace_once()


@pytest.fixture
def spice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model with four extra inputs, and its row."""
    monkeypatch.setattr("llmconv.export.families.INPUT_MAPS", dict(INPUT_MAPS))
    register_input_map("spice", SPICE)
    return save_spice(tmp_path / "spice")


def inputs_of(path: Path) -> dict[str, tuple[int, list[str | int]]]:
    """Element type and axes of the inputs of a graph that are not of its cache."""
    ports = onnx.load(path, load_external_data=False).graph.input
    found = {port.name: port.type.tensor_type for port in ports if not port.name.startswith("past_")}
    return {
        name: (kind.elem_type, [d.dim_param or d.dim_value for d in kind.shape.dim]) for name, kind in found.items()
    }


@pytest.mark.slow
def test_graphs_have_the_declared_inputs_and_compute_what_the_model_computes(spice: Path) -> None:
    export(spice)
    found = inputs_of(spice / "decode.onnx")
    assert list(found)[3:] == ["language", "features", "weights", "filled"]
    assert found["features"] == (onnx.TensorProto.FLOAT, [BATCH, SEQUENCE, 2])
    assert found["weights"] == (onnx.TensorProto.BOOL, [BATCH, TOTAL])
    report = verify(spice, record=False)
    assert report.verdict == "pass"
    names = {check.name for check in report.checks}
    assert "first and last values of extra inputs" in names


FORMS: list[dict[str, Any]] = [
    {"stages": 2},
    {"precision": "float16"},
    {"precision": "bfloat16"},
    {"quant": "int4"},
]


@pytest.mark.one_row_in(4)
@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS, ids=lambda form: next(iter(form.values())))
def test_every_form_of_graph_has_them(spice: Path, tmp_path: Path, form: dict[str, Any]) -> None:
    export(spice, tmp_path / "out", **form)
    report = verify(tmp_path / "out", reference=spice, record=False)
    assert report.verdict == "pass", report.lines()


@pytest.mark.one_row_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("form", [{"shapes": "static", "max_seq_len": 64, "batch_size": 3}, {"cache": "shared-buffer"}])
def test_a_cache_of_fixed_length_feeds_inputs_of_sequences_and_of_tokens(
    spice: Path, tmp_path: Path, form: dict[str, Any]
) -> None:
    register_input_map("spice", InputMap(extras=SPICE.extras[:2]))
    export(spice, tmp_path / "out", **form)
    report = verify(tmp_path / "out", reference=spice, record=False)
    assert report.verdict == "pass", report.lines()


@pytest.mark.one_row_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("options", [{"low_memory": True}, {"method": "induction"}], ids=["layered", "induction"])
def test_every_method_of_verification_feeds_them(spice: Path, options: dict[str, Any]) -> None:
    export(spice)
    assert verify(spice, record=False, **options).verdict == "pass"


@pytest.mark.one_row_in(4)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["language", "features", "weights", "filled"])
def test_a_graph_that_computes_with_another_value_fails(spice: Path, name: str) -> None:
    export(spice, unified=True)
    model = onnx.load(spice / "model.onnx", load_external_data=False)
    changed = "BitwiseXor" if name != "features" else "Neg"
    for node in model.graph.node:
        node.input[:] = [f"{name}.other" if one == name else one for one in node.input]
    kind = {"weights": "Not", "features": "Neg", "language": "Sub", "filled": "Neg"}[name]
    given = [name, name] if kind == "Sub" else [name]
    model.graph.node.insert(0, onnx.helper.make_node(kind, given, [f"{name}.other"], name=changed))
    onnx.save(model, spice / "model.onnx")
    report = verify(spice, record=False, allow_changed=True, scenario=["batch of 3", "left padding"])
    failed = {check.name for check in report.checks if check.verdict == "fail"}
    assert failed & {"batch of 3", "left padding"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("extras", "problem"),
    [
        ((ExtraInput("tongue", (BATCH,), values=3), LANGUAGE), "logits do not depend on the extra input `tongue`"),
        ((), "needs `language`, which the input map does not declare"),
        ((ExtraInput("language", (BATCH, TOTAL), values=3),), r"fails with the extra inputs `language` int64"),
        ((LANGUAGE, ExtraInput("features", (BATCH, TOTAL, 2), "float32", values=1.0)), "`features` float32"),
        ((LANGUAGE, ExtraInput("features", (BATCH, "depth", 2), "float32", values=1.0)), "`depth`"),
    ],
    ids=["ignored", "missing", "wrong rank", "wrong length", "unknown axis"],
)
def test_a_misfit_is_refused_in_words_and_nothing_is_written(
    spice: Path, extras: tuple[ExtraInput, ...], problem: str
) -> None:
    register_input_map("spice", InputMap(extras=extras))
    with pytest.raises(UnsupportedInput, match=problem):
        export(spice)
    assert not list(spice.glob("*.onnx*"))


@pytest.mark.parametrize(
    ("extras", "options", "problem"),
    [
        (SPICE.extras, {"layout": "genai"}, "layout `genai` cannot feed the input `filled`"),
        (
            (LANGUAGE, ExtraInput("weights", (BATCH, PAST), default=lambda call: call.attention_mask)),
            {"cache": "shared-buffer"},
            "runs prompts in parts|no number of past tokens",
        ),
    ],
    ids=["layout", "past"],
)
def test_what_the_options_cannot_do_is_refused(
    spice: Path, tmp_path: Path, extras: tuple[ExtraInput, ...], options: dict[str, Any], problem: str
) -> None:
    register_input_map("spice", InputMap(extras=extras))
    with pytest.raises(UnsupportedInput, match=problem):
        export(spice, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_layout_of_a_client_keeps_constant_inputs_at_their_default(spice: Path, tmp_path: Path) -> None:
    register_input_map("spice", InputMap(extras=(LANGUAGE, WEIGHTS)))
    export(spice, tmp_path / "out", layout="genai")
    assert "language" not in inputs_of(tmp_path / "out/model.onnx")
    assert verify(tmp_path / "out", record=False).verdict == "pass"


@pytest.mark.slow
def test_a_hook_that_returns_another_shape_fails_the_verification(spice: Path) -> None:
    export(spice)
    broken = InputMap(extras=(*SPICE.extras[:3], ExtraInput("filled", (BATCH,), default=wrong_shape)))
    register_input_map("spice", broken)
    with pytest.raises(UnsupportedInput, match="the hook of the extra input `filled` returns int64"):
        verify(spice, record=False)


@pytest.mark.slow
def test_a_graph_without_an_input_of_the_row_fails_the_verification(spice: Path) -> None:
    register_input_map("spice", InputMap(extras=(LANGUAGE,)))
    export(spice)
    register_input_map("spice", InputMap(extras=(LANGUAGE, FILLED)))
    report = verify(spice, record=False, scenario=["batch of 3"])
    assert "inputs are not those of the model" in next(c.detail for c in report.checks if c.name == "structure")
    assert report.verdict == "fail"


def test_an_input_may_not_be_declared_twice() -> None:
    with pytest.raises(UsageProblem, match="`language` twice"):
        InputMap(extras=(LANGUAGE, LANGUAGE))


def test_an_option_whose_values_are_measured_without_the_inputs_is_refused() -> None:
    with pytest.raises(UnsupportedInput, match="`--prefix` does not support the input `language`"):
        refuse_option({"language": LANGUAGE}, "--prefix")


def test_positions_on_three_axes_are_traced_as_an_extra_input() -> None:
    ports = [
        Port("input_ids", "int64", (BATCH, SEQUENCE)),
        Port("attention_mask", "int64", (BATCH, TOTAL)),
        Port("position_ids", "int64", (3, BATCH, SEQUENCE)),
    ]
    (_, _, positions, _, extras, _), (_, _, no_axes, _, axes, _) = example_arguments(ports)
    assert positions is None and no_axes is None
    assert [tuple(value.shape) for value in extras] == [(3, 2, 3)] and [set(one) for one in axes] == [{1, 2}]
