"""from-hf: sizes, heads, rope, tokenizers, and what else `params.json` says or cannot say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from safetensors.torch import load_file, save_file

from llmconv.checkpoint import open_checkpoint, read_json
from llmconv.convert import from_hf, to_hf
from llmconv.convert.formats.meta import feed_forward_of, intermediate_of
from tests.builders.consolidated import shards_of, there_and_back
from tests.builders.hf_models import LLAMA, contents, save_model

RELEASED = {4096: (11008, 14336), 5120: (13824,), 6656: (17920,), 8192: (22016, 28672), 16384: (53248,)}
RELEASED |= {2048: (8192,), 3072: (8192,)}


@pytest.mark.parametrize(("dim", "sizes"), RELEASED.items())
def test_released_models_get_a_formula_that_gives_their_size(dim: int, sizes: tuple[int, ...]) -> None:
    for intermediate in sizes:
        fields = feed_forward_of(dim, intermediate)
        assert intermediate_of({"dim": dim, **fields}) == intermediate
        assert len(str(fields.get("ffn_dim_multiplier", 1.5))) == 3  # one digit, as in Meta's own files


@pytest.mark.slow
@given(dim=st.integers(2, 20000), intermediate=st.integers(1, 100_000))
def test_every_size_has_a_formula(dim: int, intermediate: int) -> None:
    fields = json.loads(json.dumps(feed_forward_of(dim, intermediate)))
    assert intermediate_of({"dim": dim, **fields}) == intermediate


def test_params_have_no_field_that_metas_first_code_would_refuse(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", LLAMA | {"num_key_value_heads": 8})
    from_hf(model, tmp_path / "out", to="meta")
    params = read_json(tmp_path / "out" / "params.json")
    assert set(params) <= {
        *("dim", "n_layers", "n_heads", "vocab_size", "multiple_of", "norm_eps"),
        "ffn_dim_multiplier",
    }


def test_heads_that_are_copied_are_counted_as_metas_code_counts_them(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", LLAMA | {"num_key_value_heads": 2})
    from_hf(model, tmp_path / "out", to="meta", shards=8)
    assert read_json(tmp_path / "out" / "params.json")["n_kv_heads"] == 8
    heads = [state["layers.0.attention.wk.weight"] for state in shards_of(tmp_path / "out").values()]
    assert torch.equal(heads[0], heads[3]) and not torch.equal(heads[3], heads[4])


@pytest.mark.slow
def test_keys_that_happen_to_be_equal_are_no_copies(tmp_path: Path) -> None:
    plain = save_model(tmp_path / "plain", LLAMA)
    tensors = load_file(plain / "model.safetensors")
    tensors["model.layers.0.self_attn.k_proj.weight"][:] = 0
    save_file(tensors, plain / "model.safetensors")
    from_hf(plain, tmp_path / "out", to="meta", shards=4)
    to_hf(tmp_path / "out", tmp_path / "back")
    assert contents(open_checkpoint(tmp_path / "back")) == contents(open_checkpoint(plain))


SCALING = {"rope_type": "llama3", "low_freq_factor": 1.0, "original_max_position_embeddings": 8192}


@pytest.mark.slow_rows("8.0-4.0")
@pytest.mark.parametrize(("factor", "high"), [(8.0, 4.0), (32.0, 4.0), (16.0, 2.0)])
def test_a_stretched_rope_comes_back(tmp_path: Path, factor: float, high: float) -> None:
    scaling = SCALING | {"factor": factor, "high_freq_factor": high}
    there_and_back(tmp_path, LLAMA | {"rope_theta": 500000.0, "rope_scaling": scaling}, "meta", 2)


@pytest.mark.parametrize("factor", [2.0, 8, 2.5])
def test_a_linear_rope_comes_back_from_accessory(tmp_path: Path, factor: float) -> None:
    scaling = {"rope_type": "linear", "factor": factor}
    there_and_back(tmp_path, LLAMA | {"rope_scaling": scaling}, "accessory", 2)


def test_a_config_of_transformers_5_means_the_same(tmp_path: Path) -> None:
    new = {name: value for name, value in LLAMA.items() if name not in ("rope_theta", "torch_dtype")}
    model = save_model(tmp_path / "model", LLAMA)
    (model / "config.json").write_text(
        json.dumps(new | {"dtype": "float32", "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}})
    )
    from_hf(model, tmp_path / "out", to="meta")
    assert read_json(tmp_path / "out" / "params.json")["rope_theta"] == 5e5


def test_a_tokenizer_model_travels_byte_for_byte(meta: Path, tmp_path: Path) -> None:
    tokenizer = (meta / "llama2_gqa_mp2_bf16" / "tokenizer.model").read_bytes()
    model = save_model(tmp_path / "model", LLAMA, {"tokenizer.model": tokenizer})
    for to in ("meta", "accessory"):
        from_hf(model, tmp_path / to, to=to)
        assert (tmp_path / to / "tokenizer.model").read_bytes() == tokenizer


@pytest.mark.parametrize("content", [b"{}", b"[", b'{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}'])
def test_a_tokenizer_that_metas_code_cannot_read_is_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    model = save_model(tmp_path / "model", LLAMA, {"tokenizer.json": content})
    from_hf(model, tmp_path / "out", to="meta")
    said = capsys.readouterr().err
    assert "has no `tokenizer.model`" in said and "no place for `tokenizer.json`" in said
    assert not (tmp_path / "out" / "tokenizer.model").exists()


def test_a_length_that_params_cannot_say_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_model(tmp_path / "model", LLAMA | {"max_position_embeddings": 77})
    from_hf(model, tmp_path / "out", to="meta")
    assert "does not contain `max_position_embeddings`; `to-hf` will assume 4096" in capsys.readouterr().err


def test_buffers_of_old_folders_are_left_out(tmp_path: Path, save_tensors: Callable[..., Path]) -> None:
    plain = save_model(tmp_path / "plain", LLAMA)
    tensors = load_file(plain / "model.safetensors") | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    from_hf(save_tensors("model", tensors, {"config.json": LLAMA}), tmp_path / "out", to="meta")
    assert "rope.freqs" not in torch.load(tmp_path / "out" / "consolidated.00.pth", weights_only=True)
