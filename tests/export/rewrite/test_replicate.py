"""Replication: the same graph as from tracing every layer, and a fallback if layers differ."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest

from llmconv.export import export
from llmconv.export.families import find_input_map
from llmconv.export.rewrite.norms import rewrite_linear_layers
from llmconv.export.rewrite.replicate import NotIsomorphic, name_everything, replicate, shift, warm_up
from llmconv.export.tracing.fake_model import load_config, period
from llmconv.export.tracing.trace import trace
from tests.conftest import CONFIGS, save_tiny
from tests.export.conftest import FAMILIES, as_past, eager_logits, run_graph, tokens


@pytest.mark.one_row_in(8)
@pytest.mark.slow
@pytest.mark.parametrize("model_type", FAMILIES)
def test_replicated_layers_equal_traced_layers_node_by_node(model_type: str) -> None:
    config = load_config({**CONFIGS[model_type], "model_type": model_type, "num_hidden_layers": 9})
    input_map = find_input_map(model_type)
    graphs = []
    for depth in (warm_up(9, period(config)) + 2 * period(config), 9):
        few = load_config({**CONFIGS[model_type], "model_type": model_type, "num_hidden_layers": depth})
        traced = trace(few, input_map)
        rewrite_linear_layers(traced)
        if depth < 9:
            replicate(traced, 9, period(config))
        name_everything(traced.model)
        graphs.append(traced)
    replicated, complete = graphs
    assert set(replicated.weights) == set(complete.weights)
    kinds = [Counter((n.op_type, len(n.inputs)) for n in graph.model.graph) for graph in graphs]
    assert kinds[0] == kinds[1]
    assert [v.name for v in replicated.model.graph.outputs] == [v.name for v in complete.model.graph.outputs]


@pytest.mark.slow
def test_all_layers_are_traced_if_constants_differ(tmp_path: Path) -> None:
    folder = save_tiny("gpt2", tmp_path / "gpt2", n_layer=6, scale_attn_by_inverse_layer_idx=True)
    result = export(folder)
    assert result.traced_layers == 6
    inputs = tokens(batch=2, length=9)
    outputs = run_graph(folder / "prefill.onnx", inputs)
    np.testing.assert_allclose(outputs["logits"], eager_logits(folder, inputs), atol=3e-6)


@pytest.mark.slow
def test_all_layers_of_an_irregular_pattern_are_traced(tmp_path: Path) -> None:
    kinds = ["full_attention"] * 2 + ["sliding_attention"] * 4
    folder = save_tiny(
        "qwen2", tmp_path / "q", num_hidden_layers=6, layer_types=kinds, use_sliding_window=True, sliding_window=4
    )
    assert export(folder).traced_layers == 6
    inputs = tokens(batch=2, length=12)
    outputs = run_graph(folder / "prefill.onnx", inputs)
    np.testing.assert_allclose(outputs["logits"], eager_logits(folder, inputs), atol=3e-6)


@pytest.mark.slow
def test_a_sliding_window_is_kept_beyond_its_length(tmp_path: Path) -> None:
    folder = save_tiny("mistral", tmp_path / "m", num_hidden_layers=5, sliding_window=4)
    export(folder)
    inputs = tokens(batch=2, length=17)
    first = run_graph(folder / "prefill.onnx", {name: value[:, :9] for name, value in inputs.items()})
    rest = {name: value[:, 9:] for name, value in inputs.items()} | {"attention_mask": inputs["attention_mask"]}
    outputs = run_graph(folder / "decode.onnx", rest, as_past(first))
    np.testing.assert_allclose(outputs["logits"], eager_logits(folder, inputs)[:, 9:], atol=3e-6)


@pytest.mark.slow
def test_graph_size_grows_by_the_same_step_per_layer(tmp_path: Path) -> None:
    counts = []
    for depth in (5, 6, 12):
        folder = save_tiny("llama", tmp_path / str(depth), num_hidden_layers=depth)
        export(folder, incremental=True)
        counts.append(len(onnx.load(folder / "decode.onnx", load_external_data=False).graph.node))
    assert counts[2] - counts[1] == 6 * (counts[1] - counts[0])


@pytest.mark.slow
def test_an_epilogue_that_reads_an_earlier_layer_is_refused() -> None:
    config = load_config({**CONFIGS["llama"], "model_type": "llama", "num_hidden_layers": 3})
    traced = trace(config, find_input_map("llama"))
    norm = next(node for node in traced.model.graph if "model.norm" in node.metadata_props.values().__str__())
    early = next(n for n in traced.model.graph if "layers.1." in str(n.metadata_props) and n.op_type == "Add")
    norm.replace_input_with(0, early.outputs[0])
    with pytest.raises(NotIsomorphic, match="before the last"):
        replicate(traced, 6, 1)


@pytest.mark.parametrize(
    ("name", "shifted"),
    [
        ("model.layers.2.mlp.up_proj.weight", "model.layers.5.mlp.up_proj.weight"),
        ("past_key_values.2.key", "past_key_values.5.key"),
        ("model.embed_tokens.weight", None),
        ("input_ids", None),
    ],
)
def test_names_are_shifted_by_their_layer_number_only(name: str, shifted: str | None) -> None:
    assert shift(name, "model.layers", 3) == shifted
