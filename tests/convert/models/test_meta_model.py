"""Every causal language model of the installed transformers: the blueprint and the model on the meta device agree."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from typing import Any

import pytest
from transformers import AutoConfig, logging

from llmconv.convert.models.blueprint import blueprint
from llmconv.convert.models.completeness import check_complete
from llmconv.convert.models.meta_model import gaps_of, meta_model
from llmconv.convert.models.transformers_source import causal_lm_classes
from llmconv.errors import MalformedInput
from llmconv.tensors import BY_NAME, LazyTensor
from tools.tiny_models import tiny_config

PARTS = "a model with parts besides its text: the configuration is built from other configurations"
BLUEPRINT_CANNOT_TELL: dict[str, str] = {
    **dict.fromkeys(("emu3", "fuyu", "gemma3", "gemma4", "gemma4_unified", "git", "got_ocr2"), PARTS),
    **dict.fromkeys(("llama4", "mllama", "moss_transcribe_diarize", "phi4_multimodal", "qwen3_5"), PARTS),
    **dict.fromkeys(("blt", "dots3_note", "qwen3_5_moe", "qwen4_exp"), PARTS),
    **dict.fromkeys(("dots3_note_text", "gemma4_text", "gemma4_unified_text"), "its configuration has fields by layer"),
    "data2vec-text": "the file of its configuration has another name",
    "openai-gpt": "its folder in transformers has another name",
    "xlstm": "its block is a class of the package `xlstm` where that is installed",
}
"""Types that are always built on the meta device, and why."""

NOT_BUILT = {
    "cohere_compass_text": "KeyError in transformers with its own default configuration",
    "gemma3n": "needs the package `timm`",
    "gemma4_assistant": "transformers refuses its default configuration",
    "gemma4_unified_assistant": "transformers refuses its default configuration",
    "reformer": "needs `is_decoder`, and sizes of its axial positions that fit the width",
    "musicgen": "transformers builds it from a nested configuration only",
    "musicgen_melody": "transformers builds it from a nested configuration only",
}
"""Types that transformers itself does not build from a configuration of the test."""


def config_of(kind: str) -> dict[str, Any]:
    """A configuration as `config.json` has it: tiny, or the default where a tiny one is invalid."""
    logging.set_verbosity_error()
    try:
        config = tiny_config(kind, 2)
        meta_model(json.loads(config.to_json_string(use_diff=False)))
    except Exception:
        config = AutoConfig.for_model(kind)
    fields: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return fields


def unwritten(shapes: dict[str, tuple[int, ...]]) -> dict[str, LazyTensor]:
    """Tensors that nobody reads."""
    return {
        name: LazyTensor(BY_NAME["float32"], shape, lambda *_: pytest.fail("read")) for name, shape in shapes.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted({*causal_lm_classes()} - {*NOT_BUILT}))
def test_both_mechanisms_agree_about_every_type(kind: str) -> None:
    config = config_of(kind)
    state = {name: tuple(tensor.shape) for name, tensor in meta_model(config).state_dict().items()}
    plan = blueprint(config)
    assert (plan is None) == (kind in BLUEPRINT_CANNOT_TELL)
    if plan:
        assert {name: shape or state.get(name) for name, shape in plan.shapes.items()} == state
    gaps = gaps_of(meta_model(config), state)
    assert not (gaps.missing or gaps.unexpected or gaps.mismatched)


@pytest.mark.slow_rows("gemma4_text")
@pytest.mark.parametrize("kind", ["openai-gpt", "gemma4_text"])
def test_a_model_without_a_blueprint_is_compared_on_the_meta_device(kind: str) -> None:
    config = config_of(kind)
    state = {name: tuple(tensor.shape) for name, tensor in meta_model(config).state_dict().items()}
    assert blueprint(config) is None
    assert check_complete(unwritten(state), config, "x") == []
    last = next(name for name in reversed(state) if "lm_head" not in name)
    with pytest.raises(MalformedInput, match="missing keys"):
        check_complete(unwritten({name: state[name] for name in state if name != last}), config, "x")
    with pytest.raises(MalformedInput, match="unexpected keys: `other.weight`"):
        check_complete(unwritten({**state, "other.weight": (2, 2)}), config, "x")
    with pytest.raises(MalformedInput, match=f"shape mismatch for `{last}`: expected .*, got .*"):
        check_complete(unwritten({**state, last: (*state[last], 3)}), config, "x")


def test_without_a_blueprint_the_same_tensors_are_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("mixtral")
    state = {name: tuple(tensor.shape) for name, tensor in meta_model(config).state_dict().items()}
    stored = {name: shape for name, shape in state.items() if ".experts." not in name}
    for layer in range(2):
        for expert in range(config["num_local_experts"]):
            root = f"model.layers.{layer}.block_sparse_moe.experts.{expert}"
            hidden, inner = config["hidden_size"], config["intermediate_size"]
            stored |= {f"{root}.{part}.weight": (inner, hidden) for part in ("w1", "w3")}
            stored[f"{root}.w2.weight"] = (hidden, inner)
    monkeypatch.setattr("llmconv.convert.models.blueprint.blueprint", lambda config: None)
    assert check_complete(unwritten(stored), config, "x") == []
    del stored["model.layers.1.block_sparse_moe.experts.2.w1.weight"]
    with pytest.raises(MalformedInput, match="experts"):
        check_complete(unwritten(stored), config, "x")


def test_generic_rules_alone_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("llama")
    state = {name: tuple(tensor.shape) for name, tensor in meta_model(config).state_dict().items()}
    monkeypatch.setattr("llmconv.convert.models.blueprint.blueprint", lambda config: None)
    broken = {**config, "rope_parameters": {"rope_type": "none of these"}}
    (warning,) = check_complete(unwritten(state), broken, "x")
    assert "only checked by generic rules (number of layers, " in warning
    assert "transformers cannot build the model (" in warning


@pytest.mark.parametrize(
    "fields",
    [
        {"num_hidden_layers": 10**9},
        {"text_config": {"num_hidden_layers": 10**9}},
        {"num_experts": 10**12},
        {"hidden_size": 10**30},
        {"vocab_size": 10**30},
        {"_attn_implementation": "evil/kernel", "auto_map": {"AutoConfig": "evil--evil.Evil"}, "backbone": "evil/evil"},
    ],
)
def test_a_hostile_configuration_ends_soon(fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("qwen3_moe")
    state = {name: tuple(tensor.shape) for name, tensor in meta_model(config).state_dict().items()}
    monkeypatch.setattr("llmconv.convert.models.blueprint.blueprint", lambda config: None)
    begun = time.monotonic()
    with suppress(MalformedInput):
        check_complete(unwritten(state), {**config, **fields}, "x")
    assert time.monotonic() - begun < 20
