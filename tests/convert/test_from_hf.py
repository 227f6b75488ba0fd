"""from-hf: a Hugging Face folder becomes a training checkpoint, and `to-hf` makes the same folder of it again."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModel, PreTrainedTokenizerFast
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from llmconv.checkpoint import open_checkpoint, read_json
from llmconv.cli import main
from llmconv.convert import from_hf, to_hf
from llmconv.convert.formats.meta import intermediate_of
from llmconv.convert.opening import open_training
from llmconv.errors import InputRefused, UnsupportedInput
from llmconv.generation.sampling import GenerationSettings
from tests.builders.accessory_models import FIXTURES
from tests.builders.consolidated import assert_same_shards, there_and_back
from tests.builders.hf_models import FALCON, LLAMA, MIXTRAL, save_model
from tests.builders.tiny_models import contents

SIZES = {
    "num_key_value_heads": st.sampled_from([1, 2, 4, 8]),
    "hidden_size": st.sampled_from([16, 32, 48]),
    "intermediate_size": st.sampled_from([8, 40, 56, 344]),
    "num_hidden_layers": st.integers(1, 3),
    "vocab_size": st.sampled_from([8, 24, 64]),
    "tie_word_embeddings": st.booleans(),
    "torch_dtype": st.sampled_from(["float32", "float16", "bfloat16"]),
    "rope_theta": st.sampled_from([10000.0, 500000.0, 1e6]),
    "rms_norm_eps": st.sampled_from([1e-5, 1e-6]),
}
LLAMAS = st.fixed_dictionaries(SIZES).map(lambda changes: LLAMA | changes)


@pytest.mark.parametrize("class_name", ["LlamaModel", "LlamaForCausalLM"])
def test_a_model_that_automodel_saved_is_written_as_the_whole_one(tmp_path: Path, class_name: str) -> None:
    """Qwen3-Embedding is released so, with the class of the whole model in `architectures`."""
    save_model(tmp_path / "whole", LLAMA | {"tie_word_embeddings": True})
    AutoModel.from_pretrained(tmp_path / "whole").save_pretrained(tmp_path / "base")
    config = read_json(tmp_path / "base" / "config.json") | {"architectures": [class_name]}
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    assert "embed_tokens.weight" in open_checkpoint(tmp_path / "base")
    for name in ("whole", "base"):
        from_hf(tmp_path / name, tmp_path / f"{name}-meta", to="meta")
        from_hf(tmp_path / name, tmp_path / f"{name}-gguf", to="gguf")
    for kind in ("meta", "gguf"):
        whole, base = (open_training(tmp_path / f"{name}-{kind}") for name in ("whole", "base"))
        assert contents(whole) == contents(base) and whole.config == base.config


def test_a_model_without_its_own_head_is_refused(tmp_path: Path) -> None:
    save_model(tmp_path / "whole", LLAMA | {"tie_word_embeddings": False})
    AutoModel.from_pretrained(tmp_path / "whole").save_pretrained(tmp_path / "base")
    with pytest.raises(UnsupportedInput, match="saved without its output head"):
        from_hf(tmp_path / "base", tmp_path / "out", to="meta")


# How configurations state rotary positions: transformers 5, 4, both, and what users add to a file of either
ROPES: dict[str, dict[str, Any]] = {
    "of 5": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    "of 5, with the old base": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "rope_theta": 1e4},
    "of 4": {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "added to 5": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    },
    "both": {
        "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5},
        "rope_theta": 2e4,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    },
    "null, and of 5": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "rope_scaling": None},
    "llama3 added to 5": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
}


def rotation(folder: Path) -> Any:
    """The frequencies of each pair of dimensions, and the scale of attention, that transformers computes."""
    embedding = LlamaRotaryEmbedding(AutoConfig.from_pretrained(folder))
    return [round(float(one), 9) for one in embedding.inv_freq], embedding.attention_scaling


@pytest.mark.quick_rows("both-gguf", "added to 5-mindformers")
@pytest.mark.parametrize("to", ["meta", "gguf", "paddle", "mindformers", "accessory"])
@pytest.mark.parametrize("stated", ROPES)
def test_written_positions_are_those_of_transformers(stated: str, to: str, tmp_path: Path) -> None:
    plain = {name: value for name, value in LLAMA.items() if name != "rope_theta"}
    folder = save_model(tmp_path / "in", plain | ROPES[stated])
    try:
        from_hf(folder, tmp_path / "out", to=to)
    except UnsupportedInput as refusal:  # a format without this scaling
        assert "rope_" in str(refusal)
        return
    to_hf(tmp_path / "out", tmp_path / "back")
    assert rotation(tmp_path / "back") == rotation(folder)


def write_tokenizer(folder: Path, ends: str) -> None:
    """A byte-level tokenizer of 300 tokens in the three files of transformers 5; `ends` is its end token."""
    letters = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(letters, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token=ends)
    tokenizer.save_pretrained(folder)


# What `config.json` says of generation, where that has no file of its own (as before transformers 4.26)
STATED: dict[str, dict[str, Any]] = {
    "several ends": {"eos_token_id": [257, 5]},
    "another end than the tokenizer's": {"eos_token_id": 5},
    "sampling": {"eos_token_id": 257, "do_sample": True, "temperature": 0.5, "repetition_penalty": 1.2},
}


@pytest.fixture
def stating(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    folder = save_model(tmp_path / "in", LLAMA | {"vocab_size": 258})
    (folder / "generation_config.json").unlink(missing_ok=True)
    write_tokenizer(folder, "</s>")
    config = read_json(folder / "config.json") | {"bos_token_id": 256} | STATED[request.param]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.quick_rows("several ends-accessory", "sampling-paddle")
@pytest.mark.parametrize("to", ["paddle", "mindformers", "accessory"])
@pytest.mark.parametrize("stating", STATED, indirect=True)
def test_a_text_ends_as_before_where_only_the_config_says_how(stating: Path, to: str, tmp_path: Path) -> None:
    from_hf(stating, tmp_path / "out", to=to)
    to_hf(tmp_path / "out", tmp_path / "back")
    before, after = (
        replace(GenerationSettings.of(path), explicit=frozenset()) for path in (stating, tmp_path / "back")
    )
    assert after == before


@pytest.mark.quick_rows("several ends")
@pytest.mark.parametrize("stating", STATED, indirect=True)
def test_what_only_the_config_says_of_generation_is_named_where_it_has_no_place(
    stating: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from_hf(stating, tmp_path / "out", to="meta")
    said = capsys.readouterr().err
    assert "has no place for" in said and "`eos_token_id`" in said and "`generation_config.json`" not in said


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(config=LLAMAS, shards=st.sampled_from([1, 2, 4, 8]))
def test_meta_and_back_is_the_same_model(
    tmp_path_factory: pytest.TempPathFactory, config: dict[str, Any], shards: int
) -> None:
    folder = tmp_path_factory.mktemp("meta")
    there_and_back(folder, config, "meta", shards)
    assert len(list((folder / "out").glob("consolidated.*.pth"))) == shards


BIASED = st.fixed_dictionaries(
    {
        **SIZES,
        "attention_bias": st.booleans(),
        "mlp_bias": st.booleans(),
        "num_key_value_heads": st.sampled_from([4, 8]),
    }
)
EXPERTS = {**SIZES, "num_key_value_heads": st.sampled_from([4, 8]), "num_local_experts": st.sampled_from([4, 8])}
FALCON_KINDS = st.fixed_dictionaries({name: st.booleans() for name in ("multi_query", "parallel_attn", "bias")})


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    config=st.one_of(
        BIASED.map(lambda changes: LLAMA | changes),
        st.fixed_dictionaries(EXPERTS).map(lambda changes: MIXTRAL | changes),
        FALCON_KINDS.map(lambda changes: FALCON | changes),
    ),
    shards=st.sampled_from([1, 2, 4]),
)
def test_accessory_and_back_is_the_same_model(
    tmp_path_factory: pytest.TempPathFactory, config: dict[str, Any], shards: int
) -> None:
    folder = tmp_path_factory.mktemp("accessory")
    back = there_and_back(folder, config, "accessory", shards)
    assert back["max_position_embeddings"] == config["max_position_embeddings"]


# Genuine checkpoints come out of the Hugging Face folder as they went in, shard by shard

GENUINE = ("llama2_gqa_mp2_bf16", "llama3_1_scaled_mp2_bf16", "llama3_gqa_mp1_bf16")


@pytest.mark.slow_rows("llama2_gqa_mp2_bf16")
@pytest.mark.parametrize("case", GENUINE)
def test_a_genuine_meta_checkpoint_comes_back_shard_by_shard(meta: Path, tmp_path: Path, case: str) -> None:
    source = meta / case
    to_hf(source, tmp_path / "hf")
    from_hf(tmp_path / "hf", tmp_path / "out", to="meta", shards=len(list(source.glob("*.pth"))))
    assert_same_shards(source, tmp_path / "out")
    old, new = (read_json(folder / "params.json") for folder in (source, tmp_path / "out"))
    assert intermediate_of(new) == intermediate_of(old)
    assert {name: new[name] for name in ("dim", "n_layers", "n_heads", "norm_eps")} == {
        name: old[name] for name in ("dim", "n_layers", "n_heads", "norm_eps")
    }
    assert (tmp_path / "out" / "tokenizer.model").read_bytes() == (source / "tokenizer.model").read_bytes()


ACCESSORY = ("llama_mp2_bf16", "mixtral_mp2_bf16", "falcon7b_mp2_bf16")


@pytest.mark.parametrize("case", ACCESSORY)
def test_a_genuine_accessory_checkpoint_comes_back_shard_by_shard(tmp_path: Path, case: str) -> None:
    source = FIXTURES / case
    to_hf(source, tmp_path / "hf")
    from_hf(tmp_path / "hf", tmp_path / "out", to="accessory", shards=2)
    assert_same_shards(source, tmp_path / "out")
    assert read_json(tmp_path / "out" / "meta.json") == read_json(source / "meta.json")
    old, new = (read_json(folder / "config.json") for folder in (source, tmp_path / "out"))
    assert set(new) - set(old) <= {"n_kv_heads"}
    differ = {name for name in old if old[name] != new.get(name)}
    assert differ <= {"multiple_of", "ffn_dim_multiplier", "num_kv_heads", "n_kv_heads", "load_balancing_weight"}


# The command, and what lies beside the weights


def run(*arguments: str | Path) -> Any:
    done = CliRunner().invoke(main, ["from-hf", *map(str, arguments), "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_the_command_says_what_it_wrote(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", LLAMA)
    result = run(model, "-o", tmp_path / "out", "--to", "meta", "--shards", "2", "--dtype", "bfloat16")
    assert result["files"] == ["consolidated.00.pth", "consolidated.01.pth"]
    state = torch.load(tmp_path / "out" / "consolidated.00.pth", weights_only=True)
    assert {tensor.dtype for tensor in state.values()} == {torch.bfloat16}
    manifest = read_json(tmp_path / "out" / "llmconv.json")
    assert manifest["steps"][-1]["options"] == {"to": "meta", "shards": 2, "dtype": "bfloat16"}
    assert set(manifest["files"]) == {"consolidated.00.pth", "consolidated.01.pth", "params.json"}


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", LLAMA)
    assert run(model, "-o", tmp_path / "out", "--to", "accessory", "--dry-run")["written"] is False
    assert not (tmp_path / "out").exists()


def test_an_output_of_ours_can_be_replaced_and_nothing_else(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", LLAMA)
    from_hf(model, tmp_path / "out", to="meta", shards=4)
    with pytest.raises(InputRefused, match="already exists"):
        from_hf(model, tmp_path / "out", to="meta")
    from_hf(model, tmp_path / "out", to="meta", overwrite=True)
    assert [path.name for path in (tmp_path / "out").glob("*.pth")] == ["consolidated.00.pth"]


KILLED = """
import os, signal, sys
from llmconv.convert import from_hf
calls, sync = [], os.fsync
def counted(fd):
    sync(fd)
    calls.append(fd)
    if len(calls) == 6:
        os.kill(os.getpid(), signal.SIGKILL)
os.fsync = counted
from_hf(sys.argv[1], sys.argv[2], to="meta", shards=2)
"""
"""Dies at the end of the second shard."""


@pytest.mark.slow
def test_a_killed_run_goes_on_where_it_was(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", LLAMA)
    from_hf(model, tmp_path / "whole", to="meta", shards=2)
    done = subprocess.run([sys.executable, "-c", KILLED, model, tmp_path / "out"], check=False)
    assert done.returncode == -signal.SIGKILL and not (tmp_path / "out").exists()
    first = tmp_path / ".out.llmconv-partial" / "consolidated.00.pth"
    before = first.stat().st_mtime_ns
    from_hf(model, tmp_path / "out", to="meta", shards=2, resume=True)
    assert (tmp_path / "out" / first.name).stat().st_mtime_ns == before
    assert_same_shards(tmp_path / "whole", tmp_path / "out")
