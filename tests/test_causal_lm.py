"""A configuration that does not describe a causal language model is refused in one line, whichever command reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from llmconv.causal_lm import require_rotary, require_sizes
from llmconv.cli import main
from llmconv.errors import MalformedInput, UnsupportedInput, first_line

COMMANDS = ("export MODEL", "verify MODEL", "generate MODEL --prompt a", "generate MODEL --prompt a --backend torch")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_size_that_is_a_string_is_malformed(command: str, tmp_path: Path) -> None:
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": "96"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "prefill.onnx").write_bytes(b"")
    done = CliRunner().invoke(main, command.replace("MODEL", str(tmp_path)).split())
    assert done.exit_code == 3
    assert f"`config.json` of `{tmp_path}` has `vocab_size` '96', which is not a positive integer" in done.stderr
    assert done.stderr.count("\n") == 3 and "\n\nhint: " in done.stderr


@pytest.mark.parametrize(("name", "value"), [("hidden_size", 64.0), ("num_hidden_layers", 0), ("vocab_size", True)])
def test_sizes_that_are_no_positive_integers_are_malformed(name: str, value: Any) -> None:
    for config in ({name: value}, {"text_config": {name: value}}):
        with pytest.raises(MalformedInput, match=f"has `{name}` {value}, which is not"):
            require_sizes(config, "x")


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("kind", [["llama"], {"llama": 1}, 5])
def test_a_type_that_is_no_string_is_malformed(kind: Any, command: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "prefill.onnx").write_bytes(b"")
    done = CliRunner().invoke(main, command.replace("MODEL", str(tmp_path)).split())
    assert done.exit_code == 3
    assert "not a string" in done.stderr


@pytest.mark.parametrize("value", [None, 4, [4, 8]])
def test_a_size_may_be_missing_or_one_per_layer(value: Any) -> None:
    require_sizes({"num_attention_heads": value, "text_config": None}, "x")


def test_the_reason_after_a_colon_belongs_to_the_first_line() -> None:
    assert first_line(ValueError("field `a`:\n    not an integer\nmore")) == "field `a`: not an integer"


BERT: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
"""A tiny model of the BERT kind."""

SIZES_OF: dict[str, dict[str, Any]] = {
    "big_bird": {"attention_type": "original_full"},
    "electra": {"embedding_size": 16},
    "reformer": {
        "axial_pos_embds": False,
        "attn_layers": ["local"],
        "attention_head_size": 8,
        "feed_forward_size": 24,
        "is_decoder": False,
    },
    "rembert": {"input_embedding_size": 16, "output_embedding_size": 16},
    "roc_bert": {"pronunciation_vocab_size": 9, "shape_vocab_size": 9},
    "roformer": {"embedding_size": 16},
    "xmod": {"default_language": "en_XX"},
}


def attends_to_later_tokens(kind: str, **fields: Any) -> bool:
    """Whether another last token changes the logits before it, in the class for causal language models."""
    import torch  # noqa: PLC0415 - the other tests do not need it
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415

    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **BERT, **{**SIZES_OF.get(kind, {}), **fields})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    one, other = (torch.tensor([[3, 5, 7, 9, 11, 13, 15, last]]) for last in (17, 18))
    with torch.no_grad():
        return not torch.allclose(model(one).logits[:, :-1], model(other).logits[:, :-1], atol=1e-6)


def masked_types() -> list[str]:
    """The types for which the installed transformers has a class for masked words and one for causal models."""
    from llmconv.convert.models.transformers_source import (  # noqa: PLC0415
        auto_classes,
        causal_lm_classes,
    )

    masked, causal = auto_classes("MASKED_LM"), causal_lm_classes()
    return sorted({kind for kind in masked if masked[kind] != causal.get(kind)} & causal.keys() | {"bert-generation"})


@pytest.mark.slow_rows("ernie", "megatron-bert", "roc_bert", "roformer", "xmod")
@pytest.mark.parametrize("kind", masked_types())
def test_every_type_with_a_class_for_masked_words_is_known_as_an_encoder_or_attends_to_the_past(kind: str) -> None:
    from llmconv.causal_lm import ENCODERS, is_encoder  # noqa: PLC0415

    if kind in ("bart", "mbart", "mvp"):  # encoder-decoders, whose decoders are causal by themselves
        assert kind not in ENCODERS
        return
    assert is_encoder({"model_type": kind}) and not is_encoder({"model_type": kind, "is_decoder": True})
    if kind != "reformer":  # its class refuses to be built without `is_decoder`
        assert attends_to_later_tokens(kind)
        assert not attends_to_later_tokens(kind, is_decoder=True)


@pytest.mark.parametrize(
    ("kind", "fields", "turned"),
    [
        ("minimax_m3_vl_text", {"rotary_dim": 8}, False),
        ("minimax_m3_vl_text", {"rotary_dim": 16}, True),
        ("minimax_m3_vl_text", {"rotary_dim": 8, "partial_rotary_factor": 0.5}, True),  # as the hint says
        ("minimax_m3_vl_text", {"rotary_dim": 8, "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}, True),
        ("minimax_m2", {"rotary_dim": 8, "partial_rotary_factor": 0.5}, True),
        ("gptj", {"rotary_dim": 8}, True),
        ("llama", {"rotary_dim": 4}, False),
    ],
)
def test_a_part_of_each_head_that_transformers_would_not_leave_as_it_is(
    kind: str, fields: dict[str, Any], turned: bool
) -> None:
    from transformers import AutoConfig  # noqa: PLC0415 - slow to import

    own = {"rope_theta": 10000.0, **fields}
    sizes = {} if kind == "gptj" else {"head_dim": 16}
    config = AutoConfig.for_model(kind, **sizes, **own)
    if turned:
        require_rotary(own, config)
        return
    with pytest.raises(UnsupportedInput, match="`rotary_dim` of `config.json` is ") as raised:
        require_rotary({"text_config": own}, config)
    assert f'"partial_rotary_factor": {own["rotary_dim"] / 16:g}`' in str(raised.value.hint)


@pytest.mark.parametrize("command", COMMANDS)
def test_an_encoder_under_the_name_of_a_causal_class_is_refused(command: str, tmp_path: Path) -> None:
    config = {"model_type": "bert", "architectures": ["BertLMHeadModel"], **BERT}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "prefill.onnx").write_bytes(b"")
    done = CliRunner().invoke(main, command.replace("MODEL", str(tmp_path)).split())
    assert done.exit_code == 3 and f"`{tmp_path}` is an encoder: `architectures` is BertLMHeadModel" in done.stderr
