"""`--bisect`: the node of every kind of fault is named, and what is wrong with it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from click.testing import CliRunner

from llmconv.cli import main
from llmconv.output.manifest import graph_entries
from llmconv.runtime.onnxruntime.session_settings import SessionSettings
from llmconv.verify import Report, verify
from llmconv.verify.bisect.first_wrong_node import name_node
from llmconv.verify.bisect.replay import VerifiedFolder
from llmconv.verify.graph_folder import load_whole
from llmconv.verify.reference.eager import Eager
from llmconv.verify.results import Where
from tests.builders.mutants.mutants import MUTANTS, Mutant
from tests.builders.mutants.surgery import weight_names
from tests.verify.conftest import decode_only

Broken = Callable[[str, Mutant], Path]
References = Callable[[str], Eager]

PREFILL, PADDED, CHUNKED = "prefill, 7 tokens", "left padding", "chunked prefill, every split of 9 tokens"
SLOW = pytest.mark.slow


def mutant_named(name: str) -> Mutant:
    """One row of the table of mutants."""
    return next(mutant for mutant in MUTANTS if mutant.name == name)


def failing(scenario: str, step: int, output: str, layer: int | None) -> Where:
    """A failure as `localize` tells it."""
    return Where(scenario, "decode.onnx", step, layer, output, "it differs")


def searched(folder: Path, eager: Eager, where: Where, minimize: Path | None = None) -> Report:
    """The report of a folder that failed there."""
    entries = graph_entries(folder)
    models = {entry.name: load_whole(folder, entry) for entry in entries}
    report = Report(folder.name, folder.name, "quick", [], where)
    name_node(report, VerifiedFolder(folder, entries, models, SessionSettings()), eager, minimize)
    return report


LAYER_2 = failing(PREFILL, 0, "present.2.key", 2)
LAYER_3 = failing(PREFILL, 0, "present.3.key", 3)
MASKED = failing(PREFILL, 0, "present.1.key", 1)
LOGITS = failing(PREFILL, 0, "logits", None)

FOUND = [
    (
        "llama",
        "one norm's epsilon times ten",
        MASKED,
        "layers.1.input_layernorm: epsilon 1e-05 in the graph, 1e-06 in the model",
    ),
    (
        "llama",
        "attention scale 1 % off in one layer",
        LAYER_2,
        "layers.1.self_attn: attention scale 0.2525 in the graph, 0.25 in the model",
    ),
    ("llama", "causal mask too narrow", MASKED, "model: a token does not see itself"),
    ("llama", "causal mask too wide", MASKED, "model: a token sees later tokens"),
    ("llama", "padding ignored", failing(PADDED, 0, "present.1.key", 1), "model: padding is attended to"),
    (
        "llama",
        "positions off by one",
        failing(PREFILL, 0, "present.0.key", 0),
        "rotary_emb: positions 1, 2, 3, 4 in the graph, 0, 1, 2, 3 in the model",
    ),
    (
        "llama",
        "rotary base changed",
        failing(PREFILL, 0, "present.0.key", 0),
        "rotary_emb: rotary base 10964.8 in the graph, 10000 in the model",
    ),
    (
        "llama",
        "rotary table in half precision",
        failing(PREFILL, 0, "present.0.key", 0),
        "rotary_emb: rotary frequencies rounded to float16",
    ),
    (
        "llama",
        "two present names swapped",
        failing(PREFILL, 0, "present.1.key", 1),
        "`present.1.key` contains the model's `present.2.key`",
    ),
    (
        "llama",
        "two pasts swapped",
        failing(CHUNKED, 1, "present.1.key", 1),
        "layers.1.self_attn: reads `past_key_values.2.key`, the cache of layer 2",
    ),
    (
        "llama",
        "square weight transposed",
        LAYER_2,
        "layers.1.self_attn.o_proj: `model.layers.1.self_attn.o_proj.weight` is used transposed",
    ),
    ("llama", "first side of a residual dropped", LAYER_3, "only, the model adds to it"),
    (
        "llama",
        "untied head tied",
        LOGITS,
        "lm_head: reads `model.embed_tokens.weight`, the model has `lm_head.weight` instead",
    ),
    (
        "gemma2",
        "activation in another form",
        LAYER_2,
        "layers.1.mlp.act_fn: activation gelu (erf) in the graph, gelu (tanh) in the model",
    ),
    ("gemma2", "final softcap 10 % off", LOGITS, "final softcap 33 in the graph, 30 in the model"),
    (
        "gemma2",
        "window off by one",
        failing("prefill, 33 tokens", 0, "present.1.key", 1),
        "model: sliding window 9 in the graph, 8 in the model",
    ),
    (
        "gemma2",
        "window dropped",
        failing("prefill, 33 tokens", 0, "present.1.key", 1),
        "model: tokens outside the sliding window of 8 are seen",
    ),
    (
        "gemma2",
        "attention softcap dropped in one layer",
        failing("prefill, 7 tokens, louder weights", 0, "present.3.key", 3),
        "layers.2.self_attn: attention softcap 0 in the graph, 50 in the model",
    ),
    (
        "gpt2",
        "activation constant rounded",
        LAYER_2,
        "h.1.mlp.act: activation of another form (constant 0.0447) in the graph, gelu (tanh) in the model",
    ),
    (
        "gpt2",
        "bias dropped",
        failing(PREFILL, 0, "present.1.key", 1),
        "h.1.attn.c_attn: no bias in the graph, the model adds `transformer.h.1.attn.c_attn.bias`",
    ),
    (
        "bloom",
        "ALiBi slope 1 % off",
        failing(PREFILL, 0, "present.1.key", 1),
        "transformer: ALiBi slope of head 1 0.063125 in the graph, 0.0625 in the model",
    ),
]


@pytest.mark.quick_rows(
    "llama-padding ignored",
    "llama-positions off by one",
    "llama-rotary base changed",
    "llama-first side of a residual dropped",
    "llama-untied head tied",
)
@pytest.mark.parametrize(
    ("model_type", "name", "where", "text"),
    [pytest.param(*row, marks=() if row[0] == "llama" else SLOW, id=f"{row[0]}-{row[1]}") for row in FOUND],
)
def test_a_fault_of_every_kind_is_named(
    model_type: str, name: str, where: Where, text: str, broken: Broken, eager: References
) -> None:
    found = searched(broken(model_type, mutant_named(name)), eager(model_type), where).where
    assert found and text in found.text


@pytest.mark.slow
def test_the_node_its_module_and_its_layer_are_fields_of_the_report(broken: Broken, eager: References) -> None:
    folder = broken("llama", mutant_named("attention scale 1 % off in one layer"))
    found = searched(folder, eager("llama"), LAYER_2).where
    assert found and (found.node, found.scope, found.layer, found.finding) == (
        "model.layers.1.self_attn/Attention",
        "model.layers.1.self_attn",
        1,
        "attention scale 0.2525 in the graph, 0.25 in the model",
    )


@pytest.mark.slow
def test_a_weight_that_the_audit_names_is_the_finding(
    broken: Broken, eager: References, exported: Callable[[str], Path]
) -> None:
    folder = broken("llama", mutant_named("LoRA scale 1 % off"))
    report = verify(folder, reference=exported("llama"), eager=eager("llama"), bisect=True)
    assert report.where and report.where.node == "model.layers.1.self_attn.o_proj/Gemm"
    assert report.where.finding == "`model.layers.1.self_attn.o_proj.weight` differs from the reference's values"


def rename_nodes(folder: Path, name: Callable[[str], str]) -> None:
    """Gives the nodes of the decode graph other names, and their values too."""
    model = onnx.load(folder / "decode.onnx", load_external_data=False)
    for node in model.graph.node:
        node.name = name(node.name)
    onnx.save(model, folder / "decode.onnx")


@pytest.mark.slow
def test_node_names_of_other_exporters_are_recognized(broken: Broken, eager: References) -> None:
    folder = broken("llama", mutant_named("one norm's epsilon times ten"))
    rename_nodes(folder, lambda name: "/" + name.replace(".", "/").replace("layers/", "layers."))
    found = searched(folder, eager("llama"), MASKED).where
    assert found and found.node == "/model/layers.1/input_layernorm/RMSNormalization"
    assert found.text.startswith("layers.1.input_layernorm: epsilon 1e-05 in the graph")


def test_without_node_names_only_the_first_layer_is_named(broken: Broken, eager: References) -> None:
    folder = broken("llama", mutant_named("one norm's epsilon times ten"))
    rename_nodes(folder, lambda name: "")
    report = searched(folder, eager("llama"), MASKED)
    assert report.where and (report.where.node, report.where.layer) == ("", 1)
    assert any(note.startswith("no node named") for note in report.notes)


def test_a_graph_without_a_cache_is_bisected(broken: Broken, eager: References) -> None:
    folder = broken("llama", mutant_named("attention scale 1 % off in one layer"))
    model = onnx.load(folder / "decode.onnx", load_external_data=False)
    del model.graph.output[1:]
    onnx.save(model, folder / "decode.onnx")
    found = searched(folder, eager("llama"), LOGITS).where
    assert found and found.node == "model.layers.1.self_attn/Attention"


def test_a_fault_of_graph_optimization_is_distinguished_from_one_of_the_graph(
    exported: Callable[[str], Path], eager: References
) -> None:
    found = searched(exported("llama"), eager("llama"), LAYER_2).where
    assert found and "agrees with onnxruntime's graph optimization off" in found.text


def run(*arguments: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the command."""
    result = CliRunner().invoke(main, ["verify", *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.slow
def test_on_a_folder_that_passes_there_is_nothing_to_find(exported: Callable[[str], Path], tmp_path: Path) -> None:
    folder = decode_only(exported("llama"), tmp_path / "passing")
    code, lines, _ = run(folder, "--bisect")
    assert code == 0
    assert "NOTE | nothing to find: every check passed" in lines.splitlines()


@pytest.mark.slow
def test_quiet_prints_the_location_and_the_verdict(broken: Broken, exported: Callable[[str], Path]) -> None:
    folder = broken("llama", mutant_named("one norm's epsilon times ten"))
    code, text, _ = run(folder, "--reference", exported("llama"), "--bisect", "-q")
    assert (code, [line.split()[0] for line in text.splitlines()]) == (1, ["WHERE", "FAIL:"])


@pytest.mark.slow
def test_the_command_prints_the_node_and_writes_the_piece(
    broken: Broken, exported: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = broken("llama", mutant_named("one norm's epsilon times ten"))
    code, text, _ = run(folder, "--reference", exported("llama"), "--minimize", tmp_path / "piece", "--json")
    content = json.loads(text)
    assert code == 1
    assert content["where"]["finding"] == "epsilon 1e-05 in the graph, 1e-06 in the model"
    assert content["notes"][-1].startswith("1 node with inputs in ")
    assert (tmp_path / "piece" / "piece.onnx").is_file()


def test_weights_are_named_as_in_the_files(exported: Callable[[str], Path]) -> None:
    """What `other_weight` relies on."""
    model = onnx.load(exported("llama") / "decode.onnx", load_external_data=False)
    assert weight_names(model, r"^lm_head\.weight$")
