"""inspect lists exported graphs, and counts the parameters of quantized ones as those of the model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from llmconv.cli import main
from llmconv.convert.inspection import PRESETS, WITH_TEXT, inspect
from llmconv.errors import MalformedInput
from llmconv.export import export
from llmconv.export.quantization import settings
from llmconv.verify import verify
from tests.builders.embedding_models import save_model, save_modules
from tests.builders.prefix_models import save_adapter
from tests.builders.seeing import save_seeing
from tools.tiny_models import save_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama; do not write into it."""
    folder = tmp_path_factory.mktemp("model") / "llama"
    save_tiny("llama", folder, 3)
    return folder


@pytest.fixture(scope="module")
def quantized(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`quantized(**options)` is a folder of quantized graphs; do not write into it."""
    made: dict[str, Path] = {}

    def folder(**options: Any) -> Path:
        if repr(options) not in made:
            made[repr(options)] = tmp_path_factory.mktemp("quantized") / "out"
            export(model, made[repr(options)], incremental=True, **options)
        return made[repr(options)]

    return folder


@pytest.mark.one_row_in(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "kinds"),
    [
        ({"quant": "int4"}, {(4, 32): 21, (8, 32): 1}),
        ({"quant": "int4-small", "quant_block": 64, "quant_bits": ["o_proj=8"]}, {(4, 64): 19, (8, 64): 3}),
        ({"quant": "int4", "quant_block": 16, "symmetric": True}, {(4, 16): 21, (8, 16): 1}),
        ({"quant": "a8w8"}, {(8, 0): 18, (8, 32): 4}),
    ],
    ids=["int4", "int4-small", "symmetric", "a8w8"],
)
def test_matrices_are_counted_by_bits_and_blocks(
    model: Path, quantized: Callable[..., Path], options: dict[str, Any], kinds: dict[tuple[int, int], int]
) -> None:
    found = inspect(quantized(**options))
    assert (found.format, found.quantization, found.parameters) == (
        "onnx-graphs",
        options["quant"],
        inspect(model).parameters,
    )
    assert found.codes and found.codes.matrices == {kind: count for kind, count in kinds.items() if count}


@pytest.mark.slow
def test_the_table_of_a_quantized_folder_is_about_the_model(quantized: Callable[..., Path]) -> None:
    shown = CliRunner().invoke(main, ["inspect", str(quantized(quant="int4"))]).stdout
    rows = dict(line.split("  ", 1) for line in shown.splitlines())
    assert rows["model type"].strip() == "llama" and rows["architecture"].strip() == "LlamaForCausalLM"
    assert rows["quantization"].strip() == (
        "int4 (search): 22 matrices (21 of 4 bits in blocks of 32, 1 of 8 bits in blocks of 32); 8 tensors as they are"
    )
    assert "warning" not in shown and "graph" in rows


@pytest.mark.slow
def test_graphs_of_a_model_folder_are_listed_with_its_weights(model: Path, tmp_path: Path) -> None:
    export(model, tmp_path / "out", unified=True, target="ort-cpu", cache="shared-buffer", layout="genai")
    result = CliRunner().invoke(main, ["inspect", str(tmp_path / "out"), "--json"])
    found = json.loads(result.stdout)
    graph = {"role": "unified", "files": ["model.onnx"], "opset": 24, "precision": "float32"}
    more = {"extra_inputs": [], "outputs": ["logits"], "lora_inputs": [], "prefix_tokens": 0}
    assert found["graphs"] == [{**graph, "cache": "shared-buffer", "target": "ort-cpu", **more}]
    assert (found["format"], found["layouts"], found["quantization"]) == ("hf", ["genai"], None)


@pytest.mark.slow
def test_lora_inputs_are_listed(model: Path, tmp_path: Path) -> None:
    export(model, tmp_path / "out", incremental=True, lora_inputs="q_proj,down_proj")
    (graph,) = inspect(tmp_path / "out").graphs
    assert graph.lora_inputs == ("q_proj", "down_proj")
    assert graph.line == "decode: decode.onnx, opset 23, float32, growing cache, LoRA inputs for q_proj, down_proj"


def test_a_prefix_is_listed(model: Path, tmp_path: Path) -> None:
    export(model, tmp_path / "out", prefix=save_adapter(model, tmp_path / "prefix", "PrefixTuning"))
    prefill, decode = inspect(tmp_path / "out").graphs
    assert prefill.line.endswith("growing cache, a prefix of 5 tokens")
    assert decode.line.endswith("growing cache")


@pytest.mark.slow
def test_inputs_and_outputs_of_a_model_that_sees_are_listed(tmp_path: Path) -> None:
    export(save_seeing(tmp_path / "model"))
    graphs = {graph.role: graph for graph in inspect(tmp_path / "model").graphs}
    assert graphs["decode"].extra_inputs == ("inputs_embeds",) and graphs["decode"].outputs == ("logits",)
    assert graphs["vision"].line.endswith("no cache, inputs pixel_values, outputs image_features")


@pytest.mark.slow
def test_modules_of_an_embedding_model_are_listed(tmp_path: Path) -> None:
    folder = save_modules(save_model(tmp_path / "model", "llama"))
    export(folder, task="embed")
    shown = CliRunner().invoke(main, ["inspect", str(folder)]).stdout
    assert "modules       Transformer, Pooling, Normalize\n" in shown
    assert "no cache, outputs last_hidden_state, sentence_embedding\n" in shown
    assert inspect(folder).summary()["modules"] == ["Transformer", "Pooling", "Normalize"]


@pytest.mark.parametrize("content", ["[", "{}", "[1]"])
def test_a_damaged_list_of_modules_is_a_warning(model: Path, tmp_path: Path, content: str) -> None:
    folder = shutil.copytree(model, tmp_path / "model")
    (folder / "modules.json").write_text(content)
    found = inspect(folder)
    assert not found.modules and "the modules are not listed: `modules.json` is not" in found.warnings[-1]


@pytest.mark.slow
def test_names_of_another_kind_in_a_manifest_are_left_out(model: Path, tmp_path: Path) -> None:
    export(model, tmp_path / "out", incremental=True)
    manifest = json.loads((tmp_path / "out/llmconv.json").read_bytes())
    manifest["graphs"]["decode"] |= {"inputs": [1, "x\n", "a"], "outputs": {}, "lora_inputs": 5}
    (tmp_path / "out/llmconv.json").write_text(json.dumps(manifest))
    (graph,) = inspect(tmp_path / "out").graphs
    assert (graph.extra_inputs, graph.outputs, graph.lora_inputs) == (("a",), (), ())


def test_a_wrong_number_of_parameters_in_the_manifest_is_not_believed(
    model: Path, quantized: Callable[..., Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(quantized(quant="a8w8"), tmp_path / "out")
    manifest = json.loads((folder / "llmconv.json").read_bytes())
    manifest["steps"][-1]["options"] |= {"parameters": 10**30, "quant_block": "x", "layouts": {}, "method": 5}
    manifest["graphs"]["decode"] |= {"opset": "x", "precision": [], "form": 3}
    (folder / "llmconv.json").write_text(json.dumps(manifest))
    assert 0 <= inspect(folder).parameters - inspect(model).parameters < 10_000


def test_a_broken_manifest_of_a_model_is_a_warning(model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(model, tmp_path / "model")
    (folder / "llmconv.json").write_text('{"graphs": []}')
    found = inspect(folder)
    assert found.format == "hf" and "graphs are not listed" in found.warnings[0]


def test_a_broken_manifest_of_quantized_graphs_is_refused(quantized: Callable[..., Path], tmp_path: Path) -> None:
    folder = shutil.copytree(quantized(quant="int4"), tmp_path / "out")
    (folder / "llmconv.json").write_text('{"graphs": {"decode": {"file": "../x.onnx"}}}')
    with pytest.raises(MalformedInput, match="not a valid manifest"):
        inspect(folder)


def test_default_blocks_are_those_of_the_presets() -> None:
    for presets, expected in ((settings.PRESETS, WITH_TEXT), (settings.WITHOUT_TEXT, PRESETS)):
        forms = {name: [preset.layers, preset.head] for name, preset in presets.items()}
        assert {name: max(form.size for form in pair) for name, pair in forms.items()} == expected


@pytest.fixture(scope="module")
def judged(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two graphs with a recorded verdict; do not write into it."""
    folder = tmp_path_factory.mktemp("judged") / "verified"
    export(model, folder)
    assert verify(folder, scenario=["prefill, 3 tokens"])
    return folder


@pytest.fixture
def verified(judged: Path, tmp_path: Path) -> Path:
    """A copy of such a folder."""
    return Path(shutil.copytree(judged, tmp_path / "verified"))


def shown_verdict(folder: Path) -> list[str]:
    """The lines of `inspect` on the verdict."""
    lines = CliRunner().invoke(main, ["inspect", str(folder)]).stdout.splitlines()
    return [line.removeprefix("verified").strip() for line in lines if line.startswith("verified")]


def test_the_recorded_verdict_is_shown(verified: Path) -> None:
    (line,) = shown_verdict(verified)
    assert line.startswith("pass, method whole, suite quick, 1 selected scenario, ")
    assert " checks, llmconv " in line and "onnxruntime " in line
    found = json.loads(CliRunner().invoke(main, ["inspect", str(verified), "--json"]).stdout)["verified"]
    assert (found["verdict"], found["out_of_date"], found["changed"]) == ("pass", False, [])


def test_a_folder_that_was_never_verified_has_no_verdict(model: Path, quantized: Callable[..., Path]) -> None:
    assert shown_verdict(quantized(quant="int4")) == [] == shown_verdict(model)
    assert "verified" not in inspect(quantized(quant="int4")).summary()


def append(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def other_header(path: Path) -> None:
    content = path.read_bytes()
    assert b'"format":"pt"' in content
    path.write_bytes(content.replace(b'"format":"pt"', b'"format":"np"'))


def other_epsilon(path: Path) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), "rms_norm_eps": 0.1}))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("decode.onnx", append),
        ("prefill.onnx", Path.unlink),
        ("config.json", other_epsilon),
        ("model.safetensors", other_header),
        ("model.safetensors", append),
    ],
)
def test_a_file_that_changed_after_the_verdict_is_named(
    verified: Path, name: str, change: Callable[[Path], None]
) -> None:
    change(verified / name)
    if (name, change) == ("model.safetensors", append):
        with pytest.raises(MalformedInput):  # such a file is refused before
            inspect(verified)
        return
    stale, before = shown_verdict(verified)
    assert stale == f"out of date: {name} changed since" and before.startswith("before: pass, method whole")
    assert inspect(verified).summary()["verified"]["changed"] == [name]


def test_a_graph_that_was_not_judged_is_named(verified: Path) -> None:
    manifest = json.loads((verified / "llmconv.json").read_bytes())
    del manifest["verified"]["graphs"]["prefill.onnx"]
    (verified / "llmconv.json").write_text(json.dumps(manifest))
    assert shown_verdict(verified)[0] == "out of date: prefill.onnx not verified"


@pytest.mark.quick_rows("content1")
@pytest.mark.parametrize("content", [5, {}, {"verdict": "pass"}, "\x1b[2J"])
def test_a_malformed_verdict_is_shown_as_unreadable(verified: Path, content: object) -> None:
    manifest = json.loads((verified / "llmconv.json").read_bytes())
    (verified / "llmconv.json").write_text(json.dumps({**manifest, "verified": content}))
    (line,) = shown_verdict(verified)
    assert line.startswith("unreadable: invalid `")
    assert inspect(verified).summary()["verified"]["unreadable"]
    assert verify(verified, scenario=["prefill, 3 tokens"]), "it does not disturb the next run, which replaces it"
    assert shown_verdict(verified)[0].startswith("pass, method whole")


def test_control_characters_of_a_verdict_are_not_printed(verified: Path) -> None:
    manifest = json.loads((verified / "llmconv.json").read_bytes())
    manifest["verified"]["versions"]["llmconv"] = "\x1b[2J\ud800"
    (verified / "llmconv.json").write_text(json.dumps(manifest))
    (line,) = shown_verdict(verified)
    assert "\x1b" not in line and r"\x1b[2J" in line
