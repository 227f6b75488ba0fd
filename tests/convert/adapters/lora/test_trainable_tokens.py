"""Trained token rows against PEFT's merge in float64: of a list, of named modules, with tied heads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from llmconv.convert import merge_lora
from llmconv.errors import LlmconvError, MalformedInput
from tests.builders.lora_models import Case, assert_equal, train

IDS = [3, 95, 17]


@pytest.fixture
def trained(tiny: Callable[[str], Path], tmp_path: Path) -> Callable[..., Case]:
    """`trained(model_type, dtype=…, …)` is a model with trained rows, and PEFT's merge of it."""

    def make(model_type: str, dtype: torch.dtype = torch.float32, name: str = "adapter", **fields: Any) -> Case:
        model = transformers.AutoModelForCausalLM.from_pretrained(tiny(model_type), dtype=dtype)
        return train(model, tmp_path, name=name, **{"target_modules": ["q_proj"], **fields})

    return make


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("llama", {"trainable_token_indices": IDS}),
        ("llama", {"trainable_token_indices": {"embed_tokens": IDS}}),
        ("llama", {"trainable_token_indices": {"model.embed_tokens": IDS, "lm_head": [1, 4]}}),
        ("gpt2", {"trainable_token_indices": IDS, "target_modules": ["c_attn"]}),
        ("qwen2", {"trainable_token_indices": IDS}),
        ("qwen2", {"trainable_token_indices": IDS, "ensure_weight_tying": True, "target_modules": ["v_proj"]}),
    ],
)
def test_rows_are_replaced_as_peft_does(
    model_type: str, fields: dict[str, Any], trained: Callable[..., Case], tmp_path: Path
) -> None:
    case = trained(model_type, **fields)
    merge = merge_lora(case.base, [case.adapter], tmp_path / "out")
    assert any(name.endswith(("embed_tokens.weight", "wte.weight")) for name in merge.replaced)
    assert_equal(tmp_path / "out", case.exact)


def test_a_tied_head_stays_tied(trained: Callable[..., Case], tmp_path: Path) -> None:
    case = trained("qwen2", trainable_token_indices=IDS)
    merge = merge_lora(case.base, [case.adapter], tmp_path / "out")
    assert merge.plan.checkpoint.config["tie_word_embeddings"] is True
    assert not merge.added


def test_rows_of_a_bfloat16_base_are_rounded(trained: Callable[..., Case], tmp_path: Path) -> None:
    case = trained("llama", torch.bfloat16, trainable_token_indices=IDS)
    merge_lora(case.base, [case.adapter], tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(found, case.exact["model.embed_tokens.weight"].bfloat16())


def test_rows_keep_their_precision_in_a_wider_output(trained: Callable[..., Case], tmp_path: Path) -> None:
    case = trained("llama", torch.bfloat16, trainable_token_indices=IDS)
    rows = torch.randn(3, 64)
    rewrite(case, trainable_tokens_delta=rows)
    merge_lora(case.base, [case.adapter], tmp_path / "out", dtype="float32")
    found = load_file(tmp_path / "out" / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(found[IDS], rows)


@pytest.mark.slow
def test_trained_rows_and_factors_of_one_embedding_are_summed(trained: Callable[..., Case], tmp_path: Path) -> None:
    rows = trained("llama", trainable_token_indices=IDS)
    factors = trained("llama", name="factors", target_modules=["embed_tokens"])
    merge_lora(rows.base, [factors.adapter, rows.adapter], tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")["model.embed_tokens.weight"]
    name = "model.embed_tokens.weight"
    state = load_file(factors.adapter / "adapter_model.safetensors")
    change = 2 * state["base_model.model.model.embed_tokens.lora_embedding_B"].double()
    change = change @ state["base_model.model.model.embed_tokens.lora_embedding_A"].double()
    exact = load_file(rows.base / "model.safetensors")[name].double()
    exact[IDS] = load_file(rows.adapter / "adapter_model.safetensors")[
        "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
    ].double()
    assert torch.equal(found, (exact + change.T).float())


def rewrite(case: Case, **changes: Any) -> None:
    """Replaces tensors of the adapter, by the end of their names."""
    file = case.adapter / "adapter_model.safetensors"
    state = load_file(file)
    for ending, value in changes.items():
        state |= {name: value for name in state if name.endswith(ending)}
    save_file(state, file)


def refusal(case: Case, out: Path, *others: Path, **fields: Any) -> LlmconvError:
    """The error that a changed config gives."""
    path = case.adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    with pytest.raises(LlmconvError) as caught:
        merge_lora(case.base, [case.adapter, *others], out)
    assert caught.value.hint and not out.exists()
    return caught.value


@pytest.mark.quick_rows("[1, 2]", "None")
@pytest.mark.parametrize(
    "ids",
    [
        [1, 2],
        [],
        None,
        {"lm_head": IDS},
        {"embed_tokens": IDS, "lm_head": [1]},
        [1, 1, 2],
        [-1, 2, 3],
        [[1, 2, 3]],
        "123",
    ],
    ids=repr,
)
def test_ids_that_do_not_fit_the_rows_are_refused(ids: Any, trained: Callable[..., Case], tmp_path: Path) -> None:
    case = trained("llama", trainable_token_indices=IDS)
    assert isinstance(refusal(case, tmp_path / "out", trainable_token_indices=ids), MalformedInput)


@pytest.mark.slow
def test_a_row_that_the_base_does_not_have_is_refused(trained: Callable[..., Case], tmp_path: Path) -> None:
    case = trained("llama", trainable_token_indices=IDS)
    assert "[96, 64]" in refusal(case, tmp_path / "out", trainable_token_indices=[3, 96, 17]).message


def test_two_adapters_that_replace_one_row_are_refused(trained: Callable[..., Case], tmp_path: Path) -> None:
    case = trained("llama", trainable_token_indices=IDS)
    other = trained("llama", name="other", trainable_token_indices=[5, 17])
    assert "row 17" in refusal(case, tmp_path / "out", other.adapter).message


@pytest.mark.slow
def test_two_adapters_that_replace_different_rows_go_together(trained: Callable[..., Case], tmp_path: Path) -> None:
    one = trained("llama", trainable_token_indices=IDS)
    other = trained("llama", name="other", trainable_token_indices=[5])
    merge_lora(one.base, [one.adapter, other.adapter], tmp_path / "out")
    name = "model.embed_tokens.weight"
    before, after = (load_file(folder / "model.safetensors")[name] for folder in (one.base, tmp_path / "out"))
    assert sorted((before != after).any(1).nonzero().flatten().tolist()) == [3, 5, 17, 95]
