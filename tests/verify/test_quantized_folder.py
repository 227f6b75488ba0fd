"""`verify` of a folder of quantized graphs: faults in codes, scales and zero points are found."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from safetensors.numpy import load_file

from llmconv.errors import UsageProblem
from llmconv.export import export
from llmconv.tensors import Array
from llmconv.verify import verify
from llmconv.verify.other_exporters.quantized.accuracy import TokenCosts
from tests.builders.safetensors import change_tensor
from tools.tiny_models import depth, save_tiny

DOWN = "model.layers.1.mlp.down_proj.weight"
Edit = Callable[[Array], Array]


@pytest.fixture(scope="module")
def model(tiny: Callable[[str], Path]) -> Path:
    return tiny("llama")


@pytest.fixture(scope="module")
def four(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with 4 bits and zero points."""
    export(model, folder := tmp_path_factory.mktemp("four") / "out", incremental=True, quant="int4")
    return folder


def one_point_more(zeros: Array) -> Array:
    zeros[3, 0] ^= 1
    return zeros


def nibbles_exchanged(codes: Array) -> Array:
    codes[5] = codes[5] << 4 | codes[5] >> 4
    return codes


def of_the_next_block(scales: Array) -> Array:
    return np.roll(scales, 1, axis=1)


def one_code_changed(codes: Array) -> Array:
    codes[7, 1, 4] ^= 0x0C
    return codes


def of_the_next_row(codes: Array) -> Array:
    codes[[2, 3]] = codes[[3, 2]]
    return codes


def replaced(_: Array, other: Array) -> Array:
    return other


FAULTS: dict[str, tuple[str, Edit]] = {
    "a zero point one off": (".zeros", one_point_more),
    "codes of a pair exchanged": (".codes", nibbles_exchanged),
    "scales of the next block": (".scales", of_the_next_block),
    "one wrong code": (".codes", one_code_changed),
    "codes of the next row": (".codes", of_the_next_row),
}


def damaged(folder: Path, target: Path, name: str, edit: Edit) -> Path:
    """A copy with a changed tensor, and no checksums."""
    shutil.copytree(folder, target)
    change_tensor(target / "quantized.safetensors", name, edit)
    manifest = json.loads((target / "llmconv.json").read_text())
    (target / "llmconv.json").write_text(json.dumps({**manifest, "files": {}}))
    return target


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_quantizer_is_named(fault: str, model: Path, four: Path, tmp_path: Path) -> None:
    suffix, edit = FAULTS[fault]
    report = verify(damaged(four, tmp_path / "broken", DOWN + suffix, edit), reference=model)
    assert report.verdict == "fail"
    assert any(DOWN in check.detail for check in report.checks if check.verdict == "fail" and check.name == "weights")


@pytest.mark.slow
def test_codes_of_another_layer_are_found(model: Path, four: Path, tmp_path: Path) -> None:
    stored = load_file(four / "quantized.safetensors")
    broken = four
    for suffix in (".codes", ".scales", ".zeros"):
        other = stored[DOWN.replace(".1.", ".2.") + suffix]
        broken = damaged(broken, tmp_path / suffix, DOWN + suffix, partial(replaced, other=other))
    assert verify(broken, reference=model).verdict == "fail"


@pytest.mark.slow
@pytest.mark.parametrize("narrow", [np.float16, ml_dtypes.bfloat16])
def test_a_scale_in_a_narrower_type_is_named(narrow: type, model: Path, four: Path, tmp_path: Path) -> None:
    def one_row(scales: Array) -> Array:
        scales[3] = scales[3].astype(narrow)
        return scales

    broken = damaged(four, tmp_path / "broken", DOWN + ".scales", one_row)
    report = verify(broken, reference=model, scenario=["prefill, 7 tokens"])
    assert any("the scale of row 3, block 0" in check.detail for check in report.checks if check.verdict == "fail")


@pytest.mark.slow
@pytest.mark.parametrize("level", [None, 0, 2])
def test_another_accuracy_level_is_named(level: int | None, model: Path, four: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(four, tmp_path / "broken")
    graph = onnx.load(folder / "decode.onnx", load_external_data=False)
    product = next(node for node in graph.graph.node if node.op_type == "MatMulNBits")
    at = next(at for at, found in enumerate(product.attribute) if found.name == "accuracy_level")
    if level is None:
        del product.attribute[at]
    else:
        product.attribute[at].i = level
    onnx.save(graph, folder / "decode.onnx")
    report = verify(folder, reference=model, scenario=["prefill, 7 tokens"], allow_changed=True)
    failed = [(check.graph, check.detail) for check in report.checks if check.verdict == "fail"]
    assert failed == [("decode.onnx", f"`{product.name}` has accuracy_level {level or 0}; an export writes 4")]


def test_it_needs_the_model_before_quantization(four: Path) -> None:
    with pytest.raises(UsageProblem, match="are quantized, so they are compared with the model they were made from"):
        verify(four)


@pytest.mark.slow
def test_equal_graphs_run_once(model: Path, tmp_path: Path) -> None:
    export(model, tmp_path / "out", quant="int4")
    report = verify(tmp_path / "out", reference=model, scenario=["prefill, 7 tokens"])
    ((copy, first),) = report.copies.items()
    of_each = [
        [check.output for check in report.checks if check.graph == name and check.output] for name in (copy, first)
    ]
    assert of_each[0] and of_each[0] == of_each[1]
    assert list(report.evidence) == [first] and report.quantization
    assert {row["graph"] for row in report.quantization.weights} == {first}


@pytest.mark.slow
def test_limits_of_the_cost_apply(model: Path, four: Path) -> None:
    report = verify(four, reference=model, max_divergence=1e-6, scenario=["prefill, 7 tokens"])
    assert [check.name for check in report.checks if check.verdict == "fail"] == ["cost of quantization"]


def test_layer_by_layer_gives_the_same_verdict(model: Path, four: Path) -> None:
    report = verify(four, reference=model, low_memory=True)
    assert report.verdict == "pass" and report.quantization and report.quantization.cost
    assert not any(check.verdict == "fail" for check in report.checks)


@pytest.fixture(scope="module")
def spoken(talking: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer, with 4 bits."""
    export(talking, folder := tmp_path_factory.mktemp("spoken") / "out", incremental=True, quant="int4")
    return folder


@pytest.mark.slow
def test_the_cost_is_judged_by_plain_rounding_on_a_text_of_llmconv(talking: Path, spoken: Path) -> None:
    report = verify(spoken, reference=talking, scenario=["prefill, 7 tokens"])
    section = report.quantization
    assert report.verdict == "pass" and section is not None and section.cost and section.rounding and section.excess
    assert section.cost.source == "evaluation text" and section.cost.perplexities
    assert section.preset == "int4" and section.cost.divergence["mean"] != section.rounding.divergence["mean"]
    means = section.cost.divergence["mean"], section.rounding.divergence["mean"]
    assert section.excess.value == pytest.approx(means[0] - means[1])
    assert any("than with plain rounding" in check.detail for check in report.checks)


@pytest.mark.slow
def test_the_cost_of_bfloat16_graphs_is_judged_by_plain_rounding(talking: Path, tmp_path: Path) -> None:
    """They run as copies that round after every node, and the codes are not in the folder of the copy."""
    export(talking, tmp_path / "out", incremental=True, quant="int4", precision="bfloat16")
    report = verify(tmp_path / "out", reference=talking, scenario=["prefill, 7 tokens"])
    assert report.verdict == "pass" and report.quantization and report.quantization.rounding


@pytest.mark.slow
def test_lines_of_the_cost_are_whole(talking: Path, spoken: Path) -> None:
    report = verify(spoken, reference=talking, scenario=["prefill, 7 tokens"])
    lines = [line for line in report.closing_lines()[:-1] if "perplexity" in line]
    assert len(lines) == 2 and all(re.search(r"\(x [0-9.]+ ± [0-9.]+\)$", line) for line in lines)


@pytest.mark.slow
def test_limits_of_the_user_replace_the_gate(talking: Path, spoken: Path) -> None:
    report = verify(spoken, reference=talking, scenario=["prefill, 7 tokens"], max_divergence=10)
    (check,) = (check for check in report.checks if check.name == "cost of quantization")
    assert check.verdict == "pass" and "plain rounding" not in check.detail


@pytest.mark.slow
def test_without_a_tokenizer_the_cost_is_not_judged(model: Path, four: Path) -> None:
    report = verify(four, reference=model, scenario=["prefill, 7 tokens"])
    assert not any(check.name == "cost of quantization" for check in report.checks)
    assert any("the cost of `int4` was not judged" in note for note in report.notes)
    assert report.quantization and report.quantization.cost and report.quantization.cost.source == "random tokens"


ODD = {
    "mamba": "states of convolutions and recurrences beside no keys and values",
    "jamba": "both kinds of layers",
    "bert": "a head whose bias is another module's",
    "gemma3": "a graph that takes embeddings",
    "gemma3n_text": "a module that is called twice",
    "qwen2_moe": "a matrix of one row",
    "zamba2": "matrices that several layers share",
    "moshi": "a token without a logit",
}


@pytest.mark.one_row_in(4)
@pytest.mark.slow
@pytest.mark.parametrize("kind", ODD, ids=lambda kind: f"{kind}: {ODD[kind]}")
def test_graphs_of_every_kind_equal_the_model_of_their_codes(kind: str, tmp_path: Path) -> None:
    save_tiny(kind, tmp_path / "model", depth(kind))
    export(tmp_path / "model", tmp_path / "out", prefill=True, incremental=True, quant="int4", quant_block=16)
    scenarios = ["prefill, 7 tokens", "one-token prompt", "second turn", "left padding"]
    report = verify(tmp_path / "out", reference=tmp_path / "model", scenario=scenarios)
    assert report.verdict == "pass", report.closing_lines()


def test_a_token_without_a_logit_does_not_count_as_a_loss() -> None:
    logs = np.log(np.full((3, 4), 0.25))
    cost = TokenCosts("graph", "a text")
    cost.add(logs, logs, np.array([4, 1]))
    assert [len(losses) for losses in cost.losses[0]] == [1, 1]


@pytest.mark.slow
def test_graphs_whose_states_alone_are_in_float16_are_judged_by_its_rounding(tmp_path: Path) -> None:
    save_tiny("mamba2", tmp_path / "model", depth("mamba2"))
    export(tmp_path / "model", tmp_path / "out", prefill=False, incremental=True, quant="int4", precision="float16")
    report = verify(tmp_path / "out", reference=tmp_path / "model", scenario=["one-token prompt", "second turn"])
    assert report.verdict == "pass", report.lines()
