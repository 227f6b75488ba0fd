"""Composer checkpoints: genuine ones give the upstream's logits, odd ones a clear refusal."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer

from llmconv.checkpoint import open_checkpoint
from llmconv.convert import to_hf
from llmconv.convert.models.config_file import merged_configs
from llmconv.convert.models.head_and_dtype import settled
from llmconv.convert.opening import open_training
from llmconv.errors import InputRefused, MalformedInput, UnsupportedInput
from llmconv.export import export
from llmconv.files import safetensors_file
from llmconv.files.source_file import read_into
from tests.builders.own_code import composer as composer_file
from tests.test_causal_lm import BERT

CASES = ["llama_full", "weights_only", "gpt2_full", "legacy_gpt2_0135"]
FILE = "ep0-ba2-rank0.pt"


@pytest.mark.quick_rows("llama_full", "weights_only")
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_trained_model(
    composer: Path, tmp_path: Path, logits_of: Callable[..., Any], case: str
) -> None:
    to_hf(composer / case / FILE, tmp_path / "hf")
    with np.load(composer / case / "reference.npz") as reference:
        mask = reference["attention_mask"]
        logits = logits_of(tmp_path / "hf", reference["input_ids"], mask)
        assert np.abs((logits - reference["logits"]) * mask[..., None]).max() < 1e-5


@pytest.mark.parametrize("case", CASES)
def test_every_tensor_has_the_bits_of_the_trained_model(composer: Path, case: str) -> None:
    expected = json.loads((composer / case / "expected.json").read_text())
    checkpoint = settled(open_training(composer / case / FILE))
    tied = {name for group in expected["tied_groups"] for name in group[1:]}
    assert set(checkpoint) == set(expected["tensors"]) - tied
    for name, tensor in checkpoint.items():
        assert hashlib.sha256(tensor.read().tobytes()).hexdigest() == expected["tensors"][name]["sha256"], name


@pytest.mark.parametrize("case", CASES)
def test_tokenizer_files_come_back_byte_for_byte(composer: Path, case: str) -> None:
    files = {file.name: file.read_bytes() for file in (composer / case / "hf_side_files").iterdir()}
    assert open_training(composer / case / FILE).side_files == files


def test_the_tokenizer_loads(composer: Path, tmp_path: Path) -> None:
    to_hf(composer / "llama_full" / FILE, tmp_path / "hf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer.decode(tokenizer("Hello")["input_ids"], skip_special_tokens=True) == "Hello"


def test_the_config_names_the_class_and_the_dtype_and_no_machine(composer: Path, tmp_path: Path) -> None:
    to_hf(composer / "legacy_gpt2_0135" / FILE, tmp_path / "hf", dtype="bfloat16")
    config = open_checkpoint(tmp_path / "hf").config
    assert (config["architectures"], config["torch_dtype"]) == (["GPT2LMHeadModel"], "bfloat16")
    assert not {"_name_or_path", "_attn_implementation_autoset"} & set(config)


def test_a_link_to_the_latest_checkpoint_is_followed(composer: Path, tmp_path: Path) -> None:
    shutil.copy(composer / "weights_only" / FILE, tmp_path)
    (tmp_path / "latest-rank0.pt").symlink_to(FILE)
    assert len(open_training(tmp_path / "latest-rank0.pt")) == 21


def test_no_byte_is_read_but_the_weights(composer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spans: list[int] = []
    read = read_into

    def counting(path: Path, buffer: memoryview, offset: int) -> None:
        spans.append(len(buffer))
        read(path, buffer, offset)

    monkeypatch.setattr(safetensors_file, "read_into", counting)
    plan = to_hf(composer / "llama_full" / FILE, tmp_path / "hf")
    assert sum(spans) == plan.nbytes == 176_768


# Checkpoints made here, in the same layout


def state_dict() -> dict[str, torch.Tensor]:
    """A Llama of one layer, in Hugging Face names."""
    torch.manual_seed(0)
    layer = "model.layers.0."
    shapes = {
        "model.embed_tokens.weight": (8, 4),
        **{f"{layer}self_attn.{name}_proj.weight": (4, 4) for name in "qkvo"},
        **{f"{layer}mlp.{name}_proj.weight": (6, 4) for name in ("gate", "up")},
        f"{layer}mlp.down_proj.weight": (4, 6),
        f"{layer}input_layernorm.weight": (4,),
        f"{layer}post_attention_layernorm.weight": (4,),
        "model.norm.weight": (4,),
        "lm_head.weight": (8, 4),
    }
    return {name: torch.randn(shape) for name, shape in shapes.items()}


CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4,
    "intermediate_size": 6,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 8,
    "tie_word_embeddings": False,
}


def save(
    path: Path,
    model: Any,
    config: dict[str, Any] | None = CONFIG,
    tokenizer: dict[str, Any] | None = None,
    **more: Any,
) -> Path:
    """A Composer checkpoint around `model`."""
    entry = {"config": {"file_extension": ".json", "content": config, "class": "a.B"}} if config else {}
    integrations = {"huggingface": {"model": entry, "tokenizer": tokenizer or {}}}
    torch.save({"state": {"model": model, "integrations": integrations, **more}, "rng": []}, path)
    return path


def prefixed(prefix: str = "model.") -> dict[str, torch.Tensor]:
    return {prefix + name: tensor for name, tensor in state_dict().items()}


WRAPPERS = {
    "torch.compile in the middle": "model._orig_mod.",
    "torch.compile in front": "_orig_mod.model.",
    "data parallel": "module.model.",
    "FSDP": "model._fsdp_wrapped_module.",
    "FSDP of checkpointed blocks": "_fsdp_wrapped_module.model._fsdp_wrapped_module._checkpoint_wrapped_module.",
}


@pytest.mark.parametrize("prefix", WRAPPERS.values(), ids=WRAPPERS.keys())
def test_names_of_wrappers_are_removed(tmp_path: Path, prefix: str) -> None:
    checkpoint = open_training(save(tmp_path / "x.pt", prefixed(prefix)))
    assert set(checkpoint) == set(state_dict())


def test_wrappers_deep_inside_a_name_are_removed(tmp_path: Path) -> None:
    model = {name.replace("layers.0.", "layers.0._fsdp_wrapped_module."): t for name, t in prefixed().items()}
    assert set(open_training(save(tmp_path / "x.pt", model))) == set(state_dict())


def test_buffers_and_values_that_are_no_tensors_are_left_out(tmp_path: Path) -> None:
    buffer = {"model.model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2), "model.notes": "text"}
    checkpoint = open_training(save(tmp_path / "x.pt", {**prefixed(), **buffer}))
    assert set(checkpoint) == set(state_dict())
    assert any("skipped 1 values that are not tensors: `notes`" in warning for warning in checkpoint.warnings)


def test_a_transposed_weight_is_written_as_it_is(tmp_path: Path) -> None:
    model = prefixed()
    name = "model.layers.0.mlp.down_proj.weight"
    model[f"model.{name}"] = model[f"model.{name}"].t().contiguous().t()
    to_hf(save(tmp_path / "x.pt", model), tmp_path / "hf")
    assert np.array_equal(open_checkpoint(tmp_path / "hf")[name].read(), state_dict()[name].numpy())


def test_a_tied_head_is_written_once_and_the_config_declares_it(tmp_path: Path) -> None:
    model = prefixed()
    model["model.lm_head.weight"] = model["model.model.embed_tokens.weight"]
    checkpoint = settled(open_training(save(tmp_path / "x.pt", model)))
    assert "lm_head.weight" not in checkpoint
    assert checkpoint.config["tie_word_embeddings"] is True


def test_a_head_that_differs_from_the_embedding_is_kept_with_any_config(tmp_path: Path) -> None:
    checkpoint = settled(open_training(save(tmp_path / "x.pt", prefixed(), {**CONFIG, "tie_word_embeddings": True})))
    assert "lm_head.weight" in checkpoint
    assert checkpoint.config["tie_word_embeddings"] is False
    assert any("they differ" in warning for warning in checkpoint.warnings)


def test_a_missing_tokenizer_is_a_warning_and_can_be_given(composer: Path, tmp_path: Path) -> None:
    path = save(tmp_path / "x.pt", prefixed())
    assert any("contains no tokenizer" in warning for warning in open_training(path).warnings)
    given = open_training(path, tokenizer=composer / "llama_full" / "hf_side_files")
    assert set(given.side_files) == {
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "special_tokens_map.json",
    }
    assert not given.warnings


def test_a_missing_config_is_refused_until_it_is_given(tmp_path: Path) -> None:
    path = save(tmp_path / "x.pt", prefixed(), config=None)
    with pytest.raises(InputRefused, match="not contain a model configuration") as refusal:
        open_training(path)
    assert "--config" in refusal.value.hint
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert len(open_training(path, config=(tmp_path / "config.json",))) == 12


def test_given_configs_win_from_left_to_right(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"rope_theta": 1, "bos_token_id": 5}')
    (tmp_path / "b.json").write_text('{"rope_theta": 2}')
    assert merged_configs((tmp_path / "a.json", tmp_path / "b.json")) == {"rope_theta": 2, "bos_token_id": 5}


def test_fields_that_run_code_are_dropped_with_a_warning(tmp_path: Path) -> None:
    config = {**CONFIG, "auto_map": {"AutoModel": "x--y.Z"}, "text_config": {"auto_map": {"a": "b"}, "size": 1}}
    checkpoint = open_training(save(tmp_path / "x.pt", prefixed(), config))
    assert "auto_map" not in json.dumps(checkpoint.config)
    assert any("dropped `auto_map`, `text_config.auto_map`" in warning for warning in checkpoint.warnings)


def test_old_and_new_file_keys_both_name_the_file(tmp_path: Path) -> None:
    tokenizer = {
        "vocab": {"file_extension": ".txt", "content": ["a", "b", ""]},
        "chat_template.jinja": {"file_extension": ".jinja", "content": "{{ x }}"},
    }
    files = open_training(save(tmp_path / "x.pt", prefixed(), tokenizer=tokenizer)).side_files
    assert files == {"vocab.txt": b"a\nb\n", "chat_template.jinja": b"{{ x }}"}


@pytest.mark.parametrize("key", ["../../x", "/etc/x", "a/b", "..\\x", ".hidden"])
def test_a_file_name_that_leads_elsewhere_is_refused(tmp_path: Path, key: str) -> None:
    tokenizer = {key: {"file_extension": ".json", "content": {}}}
    with pytest.raises(MalformedInput, match="outside the folder"):
        open_training(save(tmp_path / "x.pt", prefixed(), tokenizer=tokenizer))


@pytest.mark.parametrize("key", ["code.py", "config.json", "model.safetensors.index.json"])
def test_a_file_that_is_not_a_tokenizer_file_is_left_out_with_a_warning(tmp_path: Path, key: str) -> None:
    tokenizer = {key: {"file_extension": Path(key).suffix, "content": "x"}}
    checkpoint = open_training(save(tmp_path / "x.pt", prefixed(), tokenizer=tokenizer))
    assert not checkpoint.side_files
    assert any(f"left out `{key}`" in warning for warning in checkpoint.warnings)


def test_a_tokenizer_file_that_expands_without_end_is_refused(tmp_path: Path) -> None:
    bomb: list[Any] = ["x"]
    for _ in range(40):
        bomb = [bomb, bomb]
    tokenizer = {"tokenizer.json": {"file_extension": ".json", "content": bomb}}
    with pytest.raises(MalformedInput, match="refers to the same parts again and again"):
        open_training(save(tmp_path / "x.pt", prefixed(), tokenizer=tokenizer))


# What is refused


class Command:
    """Pickles as a call of os.system."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


def test_a_checkpoint_that_runs_a_command_is_refused_and_does_not_run_it(tmp_path: Path) -> None:
    path = save(tmp_path / "x.pt", prefixed(), callbacks={"a": Command(f"touch {tmp_path / 'canary'}")})
    with pytest.raises(MalformedInput, match="nothing was run"):
        to_hf(path, tmp_path / "hf")
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.pt"]


def test_a_truncated_checkpoint_is_refused(composer: Path, tmp_path: Path) -> None:
    data = (composer / "weights_only" / FILE).read_bytes()
    (tmp_path / "x.pt").write_bytes(data[: len(data) // 2])
    with pytest.raises(MalformedInput, match="truncated or damaged"):
        to_hf(tmp_path / "x.pt", tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_a_checkpoint_without_weights_is_refused(tmp_path: Path) -> None:
    torch.save({"state": {"optimizers": {}}, "rng": []}, tmp_path / "x.pt")
    with pytest.raises(InputRefused, match=r"has no `state\.model`"):
        to_hf(tmp_path / "x.pt", tmp_path / "hf")


def test_a_model_type_of_foreign_code_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedInput, match="unsupported model_type `my_model`"):
        open_training(save(tmp_path / "x.pt", prefixed(), {**CONFIG, "model_type": "my_model"}))


def test_a_sharded_tensor_in_the_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedInput, match="not a plain tensor"):
        open_training(save(tmp_path / "x.pt", OrderedDict({**prefixed(), "model.odd": torch.device("cpu")})))


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "layers": ({"num_hidden_layers": 2}, "has 1 layers, its configuration says 2"),
    "layers without end": ({"num_hidden_layers": 10**30}, "has 1 layers, its configuration says 1000"),
    "layers that are no number": ({"num_hidden_layers": "x"}, "has 1 layers, its configuration says x"),
    "negative layers": ({"num_hidden_layers": -1}, "has 1 layers, its configuration says -1"),
    "vocabulary": ({"vocab_size": 9}, "shape mismatch for `model.embed_tokens.weight`: expected [9, 4], got [8, "),
}


@pytest.mark.parametrize(("change", "reason"), BROKEN.values(), ids=BROKEN.keys())
def test_a_config_of_another_model_is_refused(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    with pytest.raises(MalformedInput, match=re.escape(reason)):
        open_training(save(tmp_path / "x.pt", prefixed(), {**CONFIG, **change}))


def test_an_untied_model_without_a_head_is_refused(tmp_path: Path) -> None:
    model = {name: tensor for name, tensor in prefixed().items() if "lm_head" not in name}
    with pytest.raises(MalformedInput, match="has no output head"):
        open_training(save(tmp_path / "x.pt", model))


def test_a_layer_that_lacks_a_tensor_is_refused(tmp_path: Path) -> None:
    two = {name.replace("layers.0.", "layers.1."): tensor for name, tensor in prefixed().items()}
    model = {**prefixed(), **two}
    del model["model.model.layers.1.self_attn.q_proj.weight"]
    with pytest.raises(MalformedInput, match=r"lacks 1 tensors .*: `model\.layers\.1\.self_attn\.q_proj\.weight`"):
        open_training(save(tmp_path / "x.pt", model, {**CONFIG, "num_hidden_layers": 2}))


@pytest.mark.quick_rows("roberta")
@pytest.mark.parametrize("kind", ["bert", "roberta", "electra"])
def test_a_model_for_masked_words_keeps_its_class_and_is_not_exported(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = AutoConfig.for_model(kind, **BERT)
    model = AutoModelForMaskedLM.from_config(config).eval()
    saved = composer_file(tmp_path / "ep0.pt", model, config.to_dict())
    to_hf(saved, tmp_path / "hf")
    assert "contains an encoder" in capsys.readouterr().err
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path / "hf")
    assert type(loaded) is type(model) and type(loaded).__name__ in (tmp_path / "hf/config.json").read_text()
    ids = torch.tensor([[3, 5, 7, 9, 11]])
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=0, atol=0)
    with pytest.raises(UnsupportedInput, match="is not a causal language model"):
        export(tmp_path / "hf")


def test_a_bert_that_was_trained_as_a_decoder_is_a_causal_model(tmp_path: Path) -> None:
    config = AutoConfig.for_model("bert", **BERT, is_decoder=True)
    model = AutoModelForCausalLM.from_config(config)
    to_hf(composer_file(tmp_path / "ep0.pt", model, config.to_dict()), tmp_path / "hf")
    assert '"BertLMHeadModel"' in (tmp_path / "hf/config.json").read_text()


def test_the_folder_above_that_of_a_file_names_it(tmp_path: Path) -> None:
    (tmp_path / "runs/run1").mkdir(parents=True)
    file = Path(__file__).parents[3] / "examples/tiny-llama/ep4-ba2400-rank0.pt"
    (tmp_path / "runs/run1" / file.name).symlink_to(file)
    with pytest.raises(InputRefused, match=r"is not a checkpoint itself; it contains `run1` \(`composer`\)") as caught:
        to_hf(tmp_path / "runs", tmp_path / "out")
    assert caught.value.hint == f"give one of them: `{tmp_path / 'runs/run1'}`"
