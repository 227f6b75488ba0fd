"""Families of each kind, end to end; the complete list is docs/families.md, which `make families` writes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from llmconv.checkpoint import open_checkpoint
from llmconv.cli import main
from llmconv.errors import UnsupportedInput
from llmconv.export import INPUT_MAPS, export
from llmconv.export.families import NOT_EXPORTED, find_input_map
from llmconv.export.tracing.trace import trace
from llmconv.verify import verify
from tools.tiny_models import depth, save_tiny, tiny_config

PAGE = Path("docs/families.md")

KINDS = {
    "cohere2": "windows of a pattern, parallel residual",
    "codegen": "its own attention code, fused projections in an order of its own",
    "deepseek_v2": "latent attention, complex rotation, shared experts",
    "gemma3": "a text model with an image encoder",
    "gemma4_text": "heads of another size in some layers",
    "falcon": "one key head for all",
    "gpt_oss": "stacked experts with biases, attention sinks",
    "mixtral": "experts stored one by one under other names",
    "opt": "learned positions with an offset",
}

ATTENTION = ("sdpa", "eager")

WHOLE = {"gemma4_text"}
"""Families whose layers are all traced."""


@pytest.mark.one_row_in(5)
@pytest.mark.slow
@pytest.mark.parametrize("model_type", KINDS)
def test_a_family_of_each_kind_equals_the_eager_model(tmp_path: Path, model_type: str) -> None:
    save_tiny(model_type, tmp_path / "model", depth(model_type))
    exported = export(tmp_path / "model")
    assert (exported.traced_layers == exported.num_layers) == (model_type in WHOLE)
    report = verify(tmp_path / "model")
    assert report, report.summary()


@pytest.mark.slow
def test_every_expert_is_mapped_in_place(tmp_path: Path) -> None:
    save_tiny("qwen3_moe", tmp_path / "model", 4)
    export(tmp_path / "model", incremental=True)
    graph = onnx.load(tmp_path / "model" / "decode.onnx", load_external_data=False).graph
    external = {tensor.name for tensor in graph.initializer if tensor.external_data}
    assert external == set(open_checkpoint(tmp_path / "model"))


def test_every_row_of_the_registry_has_passed() -> None:
    listed = set(re.findall(r"^\| `([^`]+)` \| \d", PAGE.read_text(), re.MULTILINE))
    assert set(INPUT_MAPS) <= listed


def test_every_type_of_transformers_is_exported_or_has_a_reason() -> None:
    types = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert types <= INPUT_MAPS.keys() | NOT_EXPORTED.keys()
    assert not INPUT_MAPS.keys() & NOT_EXPORTED.keys()


def test_a_type_that_is_not_exported_is_refused_with_the_reason() -> None:
    with pytest.raises(UnsupportedInput, match=r"`jetmoe` are not exported: its code for experts loops") as caught:
        find_input_map("jetmoe")
    assert "docs/families.md" in caught.value.hint


@pytest.mark.filterwarnings("ignore")
def test_a_model_that_transformers_computes_in_two_ways_is_refused(tmp_path: Path) -> None:
    """Falcon with ALiBi (optimum 2326): eager attention, the reference of `verify`, adds the biases twice."""
    save_tiny("falcon", tmp_path / "model", 2)
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "alibi": True}))
    models = [AutoModelForCausalLM.from_pretrained(tmp_path / "model", attn_implementation=kind) for kind in ATTENTION]
    sdpa, eager = (model(torch.arange(3, 10)[None]).logits for model in models)
    assert not torch.allclose(sdpa, eager, atol=1e-3)  # else it can be exported again
    with pytest.raises(UnsupportedInput, match="`falcon` with `alibi` are not exported or verified"):
        export(tmp_path / "model")


def test_the_page_and_the_command_list_the_reasons() -> None:
    listed = dict(re.findall(r"^\| `([^`]+)` \| ([^|]+) \|$", PAGE.read_text(), re.MULTILINE))
    printed = json.loads(CliRunner().invoke(main, ["families", "--json"]).stdout)
    for name, reason in NOT_EXPORTED.items():
        assert listed[name] == reason and printed[name] == {"not_exported": reason}


@pytest.mark.slow
def test_a_changed_score_of_the_router_is_in_the_graph(tmp_path: Path) -> None:
    """The correction of a router is a buffer, but trained: it must not become a constant."""
    save_tiny("deepseek_v3", tmp_path / "model", 4)
    export(tmp_path / "model", incremental=True)
    graph = onnx.load(tmp_path / "model" / "decode.onnx", load_external_data=False).graph
    assert any(tensor.name.endswith("e_score_correction_bias") for tensor in graph.initializer if tensor.external_data)


@pytest.mark.slow
def test_layers_with_latent_attention_are_replicated(tmp_path: Path) -> None:
    save_tiny("youtu", tmp_path / "model", 5)
    assert export(tmp_path / "model", incremental=True).traced_layers == 3


@pytest.mark.slow
def test_layers_before_those_with_experts_are_traced_too(tmp_path: Path) -> None:
    config = save_tiny("deepseek_v3", tmp_path / "model", 7)
    assert config.first_k_dense_replace == 3
    assert export(tmp_path / "model", incremental=True).traced_layers == 6


@pytest.mark.slow
def test_a_model_whose_factors_follow_from_its_depth_is_traced_whole(tmp_path: Path) -> None:
    save_tiny("minicpm3", tmp_path / "model", 5)
    assert export(tmp_path / "model", incremental=True).traced_layers == 5


@pytest.mark.slow
def test_an_epsilon_as_small_as_a_rounding_error_is_kept() -> None:
    """The optimizer's own patterns treat 1e-8 as zero."""
    traced = trace(tiny_config("helium", 3), INPUT_MAPS["helium"])
    constants = [value.const_value.numpy() for value in traced.model.graph.initializers.values() if value.const_value]
    assert any(constant.size == 1 and np.isclose(constant.item(), 1e-8, rtol=1e-3, atol=0) for constant in constants)


@pytest.mark.slow
def test_image_encoders_stay_in_the_folder_and_out_of_the_graph(tmp_path: Path) -> None:
    save_tiny("llama4", tmp_path / "model", 2)
    export(tmp_path / "model", incremental=True)
    names = {
        tensor.name
        for tensor in onnx.load(tmp_path / "model" / "decode.onnx", load_external_data=False).graph.initializer
    }
    assert any("vision" in name for name in open_checkpoint(tmp_path / "model"))
    assert not any("vision" in name for name in names)
