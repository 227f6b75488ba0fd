"""What lies around a checkpoint: a run's folder above it, its tokenizer, an adapter next to merged weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from llmconv.convert import to_hf
from llmconv.convert.formats.megatron.config import with_layers_of_stage
from llmconv.convert.formats.megatron.experts import Arguments
from llmconv.convert.models.config_file import with_architecture
from llmconv.convert.opening import explain, open_training
from llmconv.errors import InputRefused, UnsupportedInput
from tests.builders.megatron_saves import Shape, hugging_face_state, rank_state

SHAPE = Shape(layers=1)
STAGE = ["decoder_last_pipeline_num_layers", "decoder_first_pipeline_num_layers"]


def _save(folder: Path, state: dict[str, torch.Tensor], **arguments: object) -> Path:
    """A run of Megatron-LM in one rank; the `config.json` with its vocabulary is next to it."""
    rank = folder / "iter_0000001" / "mp_rank_00"
    rank.mkdir(parents=True)
    content = {"args": SHAPE.arguments(**arguments), "checkpoint_version": 3.0, "model": state}
    torch.save(content, rank / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("1")
    words = folder.parent / "vocabulary.json"
    words.write_text(json.dumps({"vocab_size": SHAPE.words}))
    return words


@pytest.mark.parametrize("name", STAGE)
def test_run_of_one_stage_has_the_layers_that_the_stage_was_given(tmp_path: Path, name: str) -> None:
    state = rank_state(SHAPE, hugging_face_state(SHAPE), (0, 0, 0, 0))
    words = _save(tmp_path / "run", state, num_layers=4, **{name: 1})
    opened = open_training(tmp_path / "run", config=(words,))
    assert opened.config["num_hidden_layers"] == 1
    assert f"the run had 1 layers, not `num_layers` 4: its only stage was given `{name}`" in opened.warnings


def test_stage_of_several_says_nothing_of_all_layers(tmp_path: Path) -> None:
    shape = replace(SHAPE, layers=2, pipeline=2)
    given = Arguments(vars(shape.arguments(**{STAGE[0]: 1})), "run")
    assert with_layers_of_stage(given) == (given, [])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_tokenizer_of_a_trainers_folder_goes_along_with_the_shards_in_it(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save  # noqa: PLC0415

    step = tmp_path / "checkpoint-2"
    state = {name: tensor for name, tensor in hugging_face_state(SHAPE).items()}
    step.mkdir()
    save({"model": state}, checkpoint_id=step / "pytorch_model_fsdp_0", no_dist=True)
    (step / "tokenizer_config.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text('{"of": "another"}')
    settings = {"model_type": "llama", "vocab_size": SHAPE.padded, "hidden_size": SHAPE.hidden, "num_hidden_layers": 1}
    settings |= {"num_attention_heads": SHAPE.heads, "num_key_value_heads": SHAPE.groups}
    settings |= {"intermediate_size": SHAPE.inner, "tie_word_embeddings": False}
    (tmp_path / "llama.json").write_text(json.dumps(settings))
    opened = open_training(step, config=(tmp_path / "llama.json",))
    assert opened.side_files["tokenizer_config.json"] == b"{}"


def test_adapter_of_megatron_bridge_is_named_with_the_way_out(tmp_path: Path) -> None:
    state = {"decoder.layers.0.self_attention.linear_qkv.adapter.linear_in.weight": torch.ones(2, 16)}
    words = _save(tmp_path / "run", state)
    with pytest.raises(UnsupportedInput, match="adapter of Megatron Bridge") as error:
        to_hf(tmp_path / "run", tmp_path / "out", config=[words])
    assert "export_adapter_ckpt" in error.value.hint


def test_folder_of_a_run_is_refused_with_the_checkpoints_in_it(tmp_path: Path) -> None:
    state = {"tok_embeddings.weight": torch.ones(4, 8)}
    for epoch in range(2):
        (tmp_path / "run" / f"epoch{epoch}").mkdir(parents=True)
        torch.save(
            {"model": {f"llma.{name}": tensor for name, tensor in state.items()}},
            tmp_path / "run" / f"epoch{epoch}" / "consolidated.00-of-01.model.pth",
        )
    found = explain(tmp_path / "run")
    assert isinstance(found, InputRefused)
    assert "contains `epoch0` (`accessory`), `epoch1` (`accessory`)" in found.message
    assert found.hint.endswith("run/epoch1`")


def test_epoch_with_merged_weights_and_its_adapter_says_so(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    for name in ("adapter_model.safetensors", "model.safetensors", "config.json"):
        (tmp_path / name).write_text("{}")
    assert "may be merged already" in explain(tmp_path).message


def test_model_with_an_encoder_gets_no_hint_at_code_of_its_own() -> None:
    with pytest.raises(UnsupportedInput, match="`t5`") as error:
        with_architecture({"model_type": "t5", "is_encoder_decoder": True})
    assert "encoder and a decoder" in error.value.hint
