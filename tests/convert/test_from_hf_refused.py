"""from-hf: what Meta's and Accessory's code cannot hold is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from safetensors.torch import load_file

from llmconv.convert import from_hf
from llmconv.errors import LlmconvError, MalformedInput, UnsupportedInput, UsageProblem
from tests.builders.hf_models import FALCON, LLAMA, MIXTRAL, save_model
from tests.builders.tiny_models import save_tiny

META_REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "biases": ({"attention_bias": True, "mlp_bias": True}, "`attention_bias True`, `mlp_bias True`"),
    "a window": ({"sliding_window": 4096}, "`sliding_window 4096`"),
    "another architecture": ({"model_type": "qwen2"}, "`model_type qwen2`"),
    "another activation": ({"hidden_act": "gelu"}, "`hidden_act gelu`"),
    "linear rope": ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "`rope_scaling .*linear"),
    "rope of transformers 5": ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "`rope_scaling .*yarn"),
    "heads of their own size": ({"head_dim": 8, "num_attention_heads": 4, "hidden_size": 16}, "`head_dim 8`"),
}


@pytest.mark.parametrize(("changes", "reason"), META_REFUSALS.values(), ids=META_REFUSALS.keys())
def test_a_model_that_metas_code_has_not_is_refused(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    model = save_model(tmp_path / "model", LLAMA | changes)
    with pytest.raises(UnsupportedInput, match=f"what Meta's code cannot hold: {reason}"):
        from_hf(model, tmp_path / "out", to="meta")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("to", ["meta", "accessory"])
@pytest.mark.parametrize("kind", ["gpt2", "bloom"])
def test_a_model_with_sizes_of_other_names_is_refused_as_what_it_is(tmp_path: Path, kind: str, to: str) -> None:
    save_tiny(tmp_path / "model", kind, "float32")
    with pytest.raises(UnsupportedInput, match=f"is a `{kind}`, and this format holds only"):
        from_hf(tmp_path / "model", tmp_path / "out", to=to)


ACCESSORY_REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "a window": (MIXTRAL | {"sliding_window": 4096}, "`sliding_window 4096`"),
    "stretched rope": (LLAMA | {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "`rope .*llama3"),
    "another architecture": (LLAMA | {"model_type": "qwen2"}, "`model_type qwen2`"),
    "alibi": (FALCON | {"alibi": True}, "`alibi True`"),
    "few key heads of Falcon": (FALCON | {"num_kv_heads": 2, "multi_query": False}, "`num_kv_heads 2`"),
}


@pytest.mark.parametrize(("config", "reason"), ACCESSORY_REFUSALS.values(), ids=ACCESSORY_REFUSALS.keys())
def test_a_model_that_no_plugin_is_is_refused(tmp_path: Path, config: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedInput, match=f"LLaMA2-Accessory's code cannot hold: {reason}"):
        from_hf(save_model(tmp_path / "model", config), tmp_path / "out", to="accessory")


@pytest.mark.parametrize(("to", "shards", "fits"), [("meta", 3, "1, 2, 4, 8"), ("accessory", 8, "1, 2, 4")])
def test_shards_that_do_not_divide_the_model_are_refused(tmp_path: Path, to: str, shards: int, fits: str) -> None:
    with pytest.raises(UsageProblem, match=f"does not divide among {shards} shards") as caught:
        from_hf(save_model(tmp_path / "model", LLAMA), tmp_path / "out", to=to, shards=shards)
    assert caught.value.hint == f"`--shards` may be {fits}"


@pytest.mark.parametrize("to", ["meta", "accessory"])
def test_a_folder_whose_config_is_another_models_is_refused(tmp_path: Path, to: str) -> None:
    model = save_model(tmp_path / "model", LLAMA)
    for changes in ({"vocab_size": 25}, {"hidden_size": 64}, {"num_hidden_layers": 10**30}, {"intermediate_size": 40}):
        (model / "config.json").write_text(json.dumps(LLAMA | changes))
        with pytest.raises(MalformedInput):
            from_hf(model, tmp_path / "out", to=to)


JUNK: st.SearchStrategy[Any] = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.just([]), st.just({"a": [1]}))
)
FIELDS = st.sampled_from([*LLAMA, "rope_scaling", "rope_parameters", "head_dim", "hidden_act", "attention_bias"])


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(changes=st.dictionaries(FIELDS, JUNK, max_size=2), to=st.sampled_from(["meta", "accessory"]))
def test_no_config_gives_a_traceback(
    tmp_path_factory: pytest.TempPathFactory, changes: dict[str, Any], to: str
) -> None:
    folder = tmp_path_factory.getbasetemp() / "junk"
    if not folder.exists():
        save_model(folder, LLAMA)
    (folder / "config.json").write_text(json.dumps(LLAMA | changes))
    try:
        from_hf(folder, folder.parent / "nowhere", to=to, dry_run=True)
    except LlmconvError as error:
        assert error.hint


@pytest.mark.parametrize("to", ["meta", "accessory"])
@pytest.mark.parametrize("name", ["lm_head.weight", "model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight"])
def test_a_folder_that_lacks_a_tensor_is_refused(
    tmp_path: Path, save_tensors: Callable[..., Path], to: str, name: str
) -> None:
    tensors = load_file(save_model(tmp_path / "whole", LLAMA) / "model.safetensors")
    del tensors[name]
    config = {field: value for field, value in LLAMA.items() if field != "tie_word_embeddings"}
    with pytest.raises(MalformedInput, match=name.rpartition(".")[0].rpartition(".")[2]):
        from_hf(save_tensors("model", tensors, {"config.json": config}), tmp_path / "out", to=to)


def test_a_quantized_model_is_refused(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", LLAMA | {"quantization_config": {"quant_method": "gptq"}})
    with pytest.raises(UnsupportedInput, match="is quantized"):
        from_hf(model, tmp_path / "out", to="meta")


def test_only_formats_with_a_way_back_are_offered(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", LLAMA)
    for name in ("composer", "nonsense"):
        with pytest.raises(UsageProblem) as caught:
            from_hf(model, tmp_path / "out", to=name)
        assert "accessory, gguf, meta" in caught.value.hint
