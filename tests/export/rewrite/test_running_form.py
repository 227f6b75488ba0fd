"""The form in which graphs run: the same tokens, the operators of onnxruntime, kept in the user's cache."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from llmconv.errors import UsageProblem
from llmconv.export.exporter import export
from llmconv.export.families import extra_inputs_of
from llmconv.export.rewrite import running_form
from llmconv.export.rewrite.running_form import convolve_few_columns, rewritten, to_running_form
from llmconv.files.safe_folder import user_cache
from llmconv.generation import TextModel, generate
from llmconv.generation.runners import in_form
from llmconv.runtime import SessionSettings, extra_inputs
from llmconv.runtime.extra_inputs import LOGITS_FROM
from llmconv.runtime.onnxruntime.guard import refill
from llmconv.runtime.onnxruntime.runner import OrtRunner
from llmconv.runtime.runner import default_positions
from llmconv.verify import verify
from llmconv.verify.comparison import run
from tests.builders.slow_rows import slow_but
from tests.builders.talking import save_letters
from tools.tiny_models import depth, save_tiny

GROWING = ("falcon", "bloom", "deepseek_v3", "lfm2", "mamba2", "gemma3", "qwen3_next", "kimi_linear")
"""Families whose cache stays as in the file."""
FAMILIES = [
    "llama",
    "gemma2",
    "gpt2",
    "qwen3",
    "mixtral",
    "phi3",
    "olmo2",
    "gpt_neox",
    "opt",
    "starcoder2",
    "gemma3n_text",
    *GROWING,
]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def graph_of(path: Path) -> onnx.ModelProto:
    """A graph without its weights."""
    return onnx.load(path, load_external_data=False)


def operators(model: onnx.ModelProto) -> set[str]:
    """The names of its operators."""
    return {node.op_type for node in model.graph.node}


@pytest.mark.one_row_in(8)
@pytest.mark.parametrize("family", slow_but(FAMILIES, "llama"))
def test_verify_judges_the_form_of_each_family(tmp_path: Path, family: str) -> None:
    folder = tmp_path / family
    save_tiny(family, folder, depth(family))
    export(folder, prefill=True, incremental=True)
    report = verify(folder, method="whole", record=False)
    assert report
    judged = any(check.graph.endswith(run.AS_RUN) for check in report.checks)
    assert judged
    form = rewritten(graph_of(folder / "decode.onnx"))
    assert ("GroupQueryAttention" in operators(form)) is (family not in GROWING)
    assert ("LinearAttention" in operators(form)) is (family in GROWING[-2:])
    assert ("If" in operators(form)) is (family in ("lfm2", *GROWING[-2:], "mamba2"))


@pytest.mark.parametrize("width", [2, 3, 4])  # of the window; the kernel has three columns
def test_a_convolution_behind_a_window_is_the_same_for_few_columns_and_many(width: int) -> None:
    rng = np.random.default_rng(0)
    given: dict[str, list[int | str]] = {"input_ids": [2, "l"], "new": [2, 5, "l"], "past_conv.0": [2, 5, width]}
    kinds = {"input_ids": onnx.TensorProto.INT64}
    ports = [onnx.helper.make_tensor_value_info(n, kinds.get(n, onnx.TensorProto.FLOAT), s) for n, s in given.items()]
    weights = {"w": rng.standard_normal((5, 1, 3)), "b": rng.standard_normal(5)}
    nodes = [
        onnx.helper.make_node("Concat", ["past_conv.0", "new"], ["joined"], axis=-1),
        onnx.helper.make_node("Conv", ["joined", "w", "b"], ["y"], group=5, kernel_shape=[3], name="conv"),
        onnx.helper.make_node("Conv", ["joined", "w"], ["z"], group=5, kernel_shape=[3], name="without bias"),
    ]
    results = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2, 5, "k"]) for name in "yz"]
    initializers = [onnx.numpy_helper.from_array(one.astype(np.float32), name) for name, one in weights.items()]
    graph = onnx.helper.make_graph(nodes, "g", ports, results, initializers)
    opsets = [onnx.helper.make_opsetid("", 23), onnx.helper.make_opsetid("com.microsoft", 1)]
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)
    changed = ir.from_proto(model)
    convolve_few_columns(changed)
    for number, node in enumerate(changed.graph):
        for value in node.outputs:
            value.name = value.name or f"{number}"
    form = ir.to_proto(changed)
    assert [node.op_type for node in form.graph.node].count("If") == len(results)
    before, after = (
        onnxruntime.InferenceSession(one.SerializeToString(), providers=["CPUExecutionProvider"])
        for one in (model, form)
    )
    for length in (1, 2, 16, 17, 40):
        feeds = {
            "input_ids": np.zeros((2, length), np.int64),
            "new": rng.standard_normal((2, 5, length)).astype(np.float32),
            "past_conv.0": rng.standard_normal((2, 5, width)).astype(np.float32),
        }
        for found, expected in zip(after.run(None, feeds), before.run(None, feeds), strict=True):
            np.testing.assert_allclose(found, expected, atol=1e-5)


def test_verify_fails_a_wrong_form(talking: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(path: Path, model: onnx.ModelProto) -> None:
        to_running_form(path, model)
        for node in model.graph.node:
            for field in node.attribute:
                if (node.op_type, field.name) == ("GroupQueryAttention", "scale"):
                    field.f *= 1.01

    monkeypatch.setattr(run, "to_running_form", wrong)
    report = verify(talking, method="whole", scenario=["decode chain, 16 steps"], record=False)
    assert {check.graph for check in report.checks if check.verdict == "fail"} == {f"prefill.onnx{run.AS_RUN}"}


FOR_CPU = {"target": "ort-cpu", "cache": "shared-buffer"}


@pytest.mark.parametrize("options", slow_but([{}, FOR_CPU], {}), ids=str)
def test_verify_fails_a_form_that_gives_other_logits_than_the_last(
    tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    export(tiny("llama"), output=tmp_path / "out", prefill=True, incremental=True, **options)

    def wrong(path: Path, model: onnx.ModelProto) -> None:
        to_running_form(path, model)
        (head,) = (node for node in model.graph.node if LOGITS_FROM in node.input)
        earlier = onnx.numpy_helper.from_array(np.ones(1, np.int64), "one")
        model.graph.initializer.append(earlier)
        before = onnx.helper.make_node("Sub", [LOGITS_FROM, "one"], ["before"])
        first = onnx.helper.make_node("Max", ["before", "zero"], ["first"])
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros(1, np.int64), "zero"))
        nodes = [node for node in model.graph.node if node is not head]
        head.input[1] = "first"
        place = next(at for at, node in enumerate(model.graph.node) if node.name == head.name)
        nodes[place:place] = [before, first, head]
        refill(model.graph.node, nodes)

    given: dict[str, Any] = {"method": "whole", "scenario": ["prefill, 7 tokens"], "record": False}
    assert verify(tmp_path / "out", **given)
    monkeypatch.setattr(run, "to_running_form", wrong)
    report = verify(tmp_path / "out", **given)
    failed = {check.graph for check in report.checks if check.verdict == "fail"}
    graphs = ("prefill.onnx", "decode.onnx") if options else ("prefill.onnx",)  # the two have the same bytes
    assert failed == {f"{name}, last logits{run.AS_RUN}" for name in graphs}


@pytest.mark.one_row_in(8)
@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_last_logits_alone_are_those_of_a_whole_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    folder = tmp_path / family
    save_tiny(family, folder, depth(family))
    export(folder, unified=True)
    settings = SessionSettings(extra_inputs=lambda: extra_inputs_of(folder))
    runner = OrtRunner.from_folder(folder, in_form(settings, "auto", [*folder.glob("*.onnx")]))
    ids = np.random.default_rng(0).integers(3, 90, (2, 9))
    mask = np.ones_like(ids)
    mask[1, :4] = 0
    positions = default_positions(mask, 9)
    whole = runner.prefill(ids, mask, positions)
    last = runner.prefill(ids, mask, positions, last_only=True)
    assert last.logits.shape == (2, 1, whole.logits.shape[2])
    np.testing.assert_allclose(last.logits, whole.logits[:, -1:], atol=1e-5)
    more, new = np.ones((2, 10), np.int64), ids[:, -1:]
    more[:, :9] = mask
    steps = [runner.decode(new, more, default_positions(more, 1), step.present).logits for step in (whole, last)]
    np.testing.assert_allclose(steps[0], steps[1], atol=1e-5)
    assert runner.prefill(ids, mask, positions).logits.shape == whole.logits.shape  # the next call has all again
    monkeypatch.setattr(extra_inputs, "PART", 4)
    alone, ones = ids[:1], mask[:1]  # nine tokens in three calls
    parts = runner.prefill(alone, ones, default_positions(ones, 9), last_only=True)
    np.testing.assert_allclose(parts.logits, whole.logits[:1, -1:], atol=1e-5)
    assert parts.present.length == 9
    for one, other in zip(parts.present.arrays().values(), whole.present.arrays().values(), strict=True):
        np.testing.assert_allclose(one, other[:1], atol=1e-5)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"quant": "int4", "quant_block": 32},
    {"last_logits": True},
    {"embeds": True},
    {"unified": True, "prefill": False, "incremental": False},
    {"lora_inputs": "all-linear"},
    {"postprocess": "topk:5"},
    {"precision": "float16"},
    {"stages": 2},
    {"shapes": "static", "max_seq_len": 64, "prompt_len": 8},
    {"target": "ort-cpu", "cache": "shared-buffer"},
]
IN_FILE = ("stages", "static")


@pytest.mark.parametrize("options", slow_but(OPTIONS, *OPTIONS[:3], *OPTIONS[5:7], OPTIONS[8]), ids=str)
def test_tokens_are_those_of_the_file(
    tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    folder, out = tiny("llama"), tmp_path / "out"
    export(folder, output=out, **{"prefill": True, "incremental": True, **options})
    save_letters(out)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 96, size=size).tolist() for size in (5, 9, 3)]
    found = {}
    for form, most in (("file", 512), ("auto", 512), ("mapped", 512), ("file", 3), ("auto", 3)):
        monkeypatch.setattr(extra_inputs, "PART", most)
        model = TextModel.open(out, form=form)
        settings = model.defaults.but(max_new_tokens=12, eos_token_id=())
        batches = [prompts[:1]] if "shapes" in options else [prompts, prompts[:1]]
        pieces = [piece for batch in batches for piece in model.stream(batch, settings)]
        found[form, most] = [(piece.index, piece.token) for piece in pieces if piece.token is not None]
    assert all(tokens == found["file", 512] for tokens in found.values())
    stays = any(word in f"{options}" for word in IN_FILE)
    graphs = [graph_of(path) for path in out.glob("*.onnx") if path.name != "embeddings.onnx"]
    for graph in graphs:
        before = [node.op_type for node in graph.graph.node]
        to_running_form(out, graph)
        assert ([node.op_type for node in graph.graph.node] != before) is not stays
        one = "last_logits" in options or "postprocess" in options
        assert (LOGITS_FROM in {port.name for port in graph.graph.input}) is not (stays or one)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_next", "mamba2"])
def test_tokens_of_models_with_states_are_those_of_the_file(tmp_path: Path, family: str) -> None:
    folder = tmp_path / family
    save_tiny(family, folder, depth(family))
    export(folder, prefill=True, incremental=True)
    save_letters(folder)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 96, size=size).tolist() for size in (5, 40, 3)]  # one call of few tokens, one of many
    found = {}
    for form in ("file", "auto"):
        model = TextModel.open(folder, form=form)
        settings = model.defaults.but(max_new_tokens=24, eos_token_id=())
        pieces = [piece for batch in (prompts, prompts[:1], prompts[1:2]) for piece in model.stream(batch, settings)]
        found[form] = [(piece.index, piece.token) for piece in pieces if piece.token is not None]
    assert found["file"] == found["auto"]


def multiplied_flat(head: onnx.NodeProto, flat: onnx.NodeProto) -> list[onnx.NodeProto]:
    return [flat, onnx.helper.make_node("MatMul", [flat.output[0], "turned"], head.output)]


def of_the_last_token(head: onnx.NodeProto, flat: onnx.NodeProto) -> list[onnx.NodeProto]:
    last = onnx.helper.make_node("Slice", [flat.input[0], "last", "end", "axis"], ["last_hidden"])
    return [last, onnx.helper.make_node("MatMul", ["last_hidden", "turned"], ["logits"])]


@pytest.mark.parametrize("head_of", [multiplied_flat, of_the_last_token])
def test_heads_of_other_exporters_give_the_last_logits(
    talking: Path, tmp_path: Path, head_of: Callable[[onnx.NodeProto, onnx.NodeProto], list[onnx.NodeProto]]
) -> None:
    folder = Path(shutil.copytree(talking, tmp_path / "model"))
    graph = graph_of(folder / "prefill.onnx")
    makers = {name: node for node in graph.graph.node for name in node.output}
    head = makers[makers["logits"].input[0]]
    assert head.op_type == "Gemm"
    flat = makers[head.input[0]]
    made = [onnx.helper.make_node("Transpose", [head.input[1]], ["turned"], perm=[1, 0]), *head_of(head, flat)]
    old = [head, flat, *([makers["logits"]] if "logits" in made[-1].output else [])]
    kept = [node for node in graph.graph.node if node not in old]
    ends = [makers["logits"]] if makers["logits"] in kept else []
    refill(graph.graph.node, [*(node for node in kept if node not in ends), *made, *ends])
    for name, number in (("last", -1), ("end", 1 << 62), ("axis", 1)):
        graph.graph.initializer.append(onnx.numpy_helper.from_array(np.array([number], np.int64), name))
    (folder / "prefill.onnx").write_bytes(graph.SerializeToString())
    ids = np.array([[20, 30, 40, 50, 60]])
    mask, logits = np.ones_like(ids), []
    for path, form in ((talking, "file"), (folder, "file"), (folder, "auto")):
        files = [path / "prefill.onnx"]
        runner = OrtRunner.from_files(files[0], None, in_form(SessionSettings(), form, files))
        step = runner.prefill(ids, mask, default_positions(mask, 5), last_only=True)
        logits.append(step.logits[:, -1:])
    np.testing.assert_allclose(logits[1:], logits[:1] * 2, atol=1e-5)


def attentions(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    """The nodes that attend."""
    return [node for node in model.graph.node if node.op_type == "Attention"]


def causal_by_attribute(model: onnx.ModelProto) -> None:
    for node in attentions(model):
        node.attribute.append(onnx.helper.make_attribute("is_causal", 1))


def without_mask(model: onnx.ModelProto) -> None:
    for node in attentions(model):
        del node.input[3:]


def with_filled_lengths(model: onnx.ModelProto) -> None:
    for node in attentions(model):
        node.input.extend(["", "", "attention_mask"])


def seen_by_all(model: onnx.ModelProto) -> None:
    first = attentions(model)[0]
    place = list(model.graph.node).index(first)
    model.graph.node.insert(place, onnx.helper.make_node("Sub", [first.input[3]] * 2, ["free"]))
    for node in attentions(model):
        node.input[3] = "free"


def reader_of_the_present(model: onnx.ModelProto) -> None:
    model.graph.node.append(onnx.helper.make_node("Shape", [model.graph.output[1].name], ["size"], start=2, end=3))
    model.graph.output.append(onnx.helper.make_tensor_value_info("size", onnx.TensorProto.INT64, [1]))


def exchanged(model: onnx.ModelProto) -> None:
    names = {"present.0.key": "present.1.key", "present.1.key": "present.0.key"}
    for node in model.graph.node:
        for names_of in (node.input, node.output):
            names_of[:] = [names.get(name, name) for name in names_of]


def other_order(model: onnx.ModelProto) -> None:
    ports = list(model.graph.input)
    del model.graph.input[:]
    model.graph.input.extend([ports[1], ports[0], *ports[2:]])


def with_a_sparse_initializer(model: onnx.ModelProto) -> None:
    values, places = (onnx.numpy_helper.from_array(np.ones(1, dtype)) for dtype in (np.float32, np.int64))
    values.name = "sparse"
    model.graph.sparse_initializer.append(onnx.helper.make_sparse_tensor(values, places, [2]))


def _with_an_input(model: onnx.ModelProto, axes: list[str]) -> None:
    model.graph.input.append(onnx.helper.make_tensor_value_info("extra", onnx.TensorProto.INT64, axes))
    model.graph.node.append(onnx.helper.make_node("Shape", ["extra"], ["size"]))
    model.graph.output.append(onnx.helper.make_tensor_value_info("size", onnx.TensorProto.INT64, [len(axes)]))


def with_an_input_of_all_tokens(model: onnx.ModelProto) -> None:
    _with_an_input(model, ["batch_size", "total_sequence_length"])


def with_an_input_of_rows(model: onnx.ModelProto) -> None:
    _with_an_input(model, ["batch_size"])


EDITS = [
    with_a_sparse_initializer,
    with_an_input_of_all_tokens,
    with_an_input_of_rows,
    causal_by_attribute,
    without_mask,
    with_filled_lengths,
    seen_by_all,
    reader_of_the_present,
    exchanged,
    other_order,
]


UNCHANGED = (with_a_sparse_initializer, other_order)  # the other graphs keep their attention and cache


@pytest.mark.parametrize("edit", EDITS)
def test_graphs_that_compute_something_else_stay_as_they_are(
    talking: Path, edit: Callable[[onnx.ModelProto], None]
) -> None:
    graph = graph_of(talking / "decode.onnx")
    assert "GroupQueryAttention" in operators(rewritten(graph))
    edit(graph)
    before = onnx.ModelProto.FromString(graph.SerializeToString())
    to_running_form(talking, graph)
    assert (graph == before) is (edit in UNCHANGED)
    assert not {"GroupQueryAttention"} & operators(graph)
    assert [port for port in graph.graph.input if port.name != LOGITS_FROM] == list(before.graph.input)
    assert [port.name for port in graph.graph.output] == [port.name for port in before.graph.output]
    assert list(graph.graph.output[1:]) == list(before.graph.output[1:])
    for now, then in zip(attentions(graph), attentions(before), strict=True):
        assert now.attribute == then.attribute
        assert len(now.input) == len(then.input)


def test_numbers_of_the_fused_nodes_are_kept(talking: Path) -> None:
    graph = graph_of(talking / "decode.onnx")
    for node in graph.graph.node:
        if node.op_type == "Gemm":
            node.attribute.append(onnx.helper.make_attribute("alpha", 0.5))
        elif node.op_type == "RMSNormalization":  # the default of the operator is 1e-5
            refilled = [field for field in node.attribute if field.name != "epsilon"]
            del node.attribute[:]
            node.attribute.extend(refilled)
    made = rewritten(graph)
    assert "FusedMatMul" not in operators(made)
    fused = [node for node in made.graph.node if node.op_type == "SkipSimplifiedLayerNormalization"]
    epsilons = [field.f for node in fused for field in node.attribute if field.name == "epsilon"]
    assert epsilons == pytest.approx([1e-5] * len(fused))


def test_a_form_is_made_once_and_damaged_ones_again(talking: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[int]()

    def counted(model: onnx.ModelProto) -> onnx.ModelProto:
        made.append(1)
        return rewritten(model)

    monkeypatch.setattr(running_form, "rewritten", counted)
    first, second, third, fourth = (graph_of(talking / "decode.onnx") for _ in range(4))
    to_running_form(talking, first)
    to_running_form(talking, second)
    assert len(made) == 1
    assert first == second
    (kept,) = (user_cache("forms")).iterdir()
    kept.write_bytes(b"")
    to_running_form(talking, third)
    assert len(made) == 2
    assert third == first
    kept.parent.chmod(0o777)  # others could put a graph there
    to_running_form(talking, fourth)
    assert len(made) == 3
    kept.parent.chmod(0o700)


def test_settings_that_change_a_graph_run_it_as_it_is(talking: Path) -> None:
    graphs = [talking / "decode.onnx"]
    assert in_form(SessionSettings(), "auto", graphs).change is to_running_form
    assert in_form(SessionSettings(), "auto", graphs).prepack
    assert not in_form(SessionSettings(), "mapped", graphs).prepack
    for own in (SessionSettings(free_dimensions={"past_sequence_length": 4}), SessionSettings(change=lambda *_: None)):
        assert in_form(own, "auto", graphs) is own
    with pytest.raises(UsageProblem, match="`form` is 'fast'"):
        TextModel.open(talking, form="fast")


def test_short_texts_copy_no_weights(talking: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forms = list[str]()
    opened = TextModel.open

    def noted(*given: Any, **options: Any) -> TextModel:
        forms.append(options["form"])
        return opened(*given, **options)

    monkeypatch.setattr(TextModel, "open", noted)
    generate(talking, "abc", max_new_tokens=3)
    generate(talking, ["abc"] * 200, max_new_tokens=3)
    generate(talking, ["abc", "ab"], max_new_tokens=3, prompt_prefix="cc")
    generate(talking, "abc", max_new_tokens=3, form="file")
    assert forms == ["mapped", "auto", "file", "file"]
