"""from-hf: a Hugging Face folder becomes a training checkpoint, and `to-hf` makes the same folder of it again."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from safetensors.torch import load_file, save_file

from llmconv.checkpoint import open_checkpoint, read_json
from llmconv.cli import main
from llmconv.convert import from_hf, to_hf
from llmconv.convert.meta.params import intermediate_of
from llmconv.convert.meta.params_of import feed_forward_of
from llmconv.errors import InputRefused, LlmconvError, MalformedInput, UnsupportedInput, UsageProblem
from tests.convert.accessory_models import FIXTURES
from tests.convert.hf_models import FALCON, LLAMA, MIXTRAL, contents, save_model
from tests.convert.tiny_models import save_tiny

MATTERS = (
    *("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "rms_norm_eps"),
    *("num_key_value_heads", "vocab_size", "rope_theta", "rope_scaling", "tie_word_embeddings", "torch_dtype"),
    *("num_local_experts", "num_experts_per_tok", "sliding_window", "bias", "multi_query", "parallel_attn"),
    *("new_decoder_architecture", "alibi", "layer_norm_epsilon"),
)
"""Fields of a config without which another model would come out."""
SWITCHES = ("attention_bias", "mlp_bias")


def there_and_back(folder: Path, config: dict[str, Any], to: str, shards: int) -> dict[str, Any]:
    """Asserts that every tensor and every field that matters comes back; returns the config that came."""
    model = save_model(folder / "model", config)
    from_hf(model, folder / "out", to=to, shards=shards)
    to_hf(folder / "out", folder / "back")
    back = open_checkpoint(folder / "back")
    assert contents(back) == contents(open_checkpoint(model))
    assert {name: back.config.get(name) for name in MATTERS} == {name: config.get(name) for name in MATTERS}
    assert [bool(back.config.get(name)) for name in SWITCHES] == [bool(config.get(name)) for name in SWITCHES]
    return back.config


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


def shards_of(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """The tensors of every shard as torch reads them, buffers left out."""
    files = {path.name: torch.load(path, weights_only=True) for path in sorted(folder.glob("consolidated.*.pth"))}
    states = {name: content.get("model", content) for name, content in files.items()}
    return {
        name: {key: tensor for key, tensor in state.items() if "rope.freqs" not in key}
        for name, state in states.items()
    }


def assert_same_shards(one: Path, other: Path) -> None:
    left, right = shards_of(one), shards_of(other)
    assert {name: set(state) for name, state in left.items()} == {name: set(state) for name, state in right.items()}
    for name, state in left.items():
        for key, tensor in state.items():
            assert tensor.dtype == right[name][key].dtype and torch.equal(tensor, right[name][key]), (name, key)


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


# What cannot be held is refused by name

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
        assert "accessory, meta" in caught.value.hint


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
    if len(calls) == 4:
        os.kill(os.getpid(), signal.SIGKILL)
os.fsync = counted
from_hf(sys.argv[1], sys.argv[2], to="meta", shards=2)
"""
"""Dies at the end of the second shard."""


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


# Sizes, tokenizers, and what else params.json says

RELEASED = {4096: (11008, 14336), 5120: (13824,), 6656: (17920,), 8192: (22016, 28672), 16384: (53248,)}
RELEASED |= {2048: (8192,), 3072: (8192,)}


@pytest.mark.parametrize(("dim", "sizes"), RELEASED.items())
def test_released_models_get_a_formula_that_gives_their_size(dim: int, sizes: tuple[int, ...]) -> None:
    for intermediate in sizes:
        fields = feed_forward_of(dim, intermediate)
        assert intermediate_of({"dim": dim, **fields}) == intermediate
        assert len(str(fields.get("ffn_dim_multiplier", 1.5))) == 3  # one digit, as in Meta's own files


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


def test_keys_that_happen_to_be_equal_are_no_copies(tmp_path: Path) -> None:
    plain = save_model(tmp_path / "plain", LLAMA)
    tensors = load_file(plain / "model.safetensors")
    tensors["model.layers.0.self_attn.k_proj.weight"][:] = 0
    save_file(tensors, plain / "model.safetensors")
    from_hf(plain, tmp_path / "out", to="meta", shards=4)
    to_hf(tmp_path / "out", tmp_path / "back")
    assert contents(open_checkpoint(tmp_path / "back")) == contents(open_checkpoint(plain))


SCALING = {"rope_type": "llama3", "low_freq_factor": 1.0, "original_max_position_embeddings": 8192}


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
    assert "does not hold `max_position_embeddings`; `to-hf` will take 4096" in capsys.readouterr().err


def test_buffers_of_old_folders_are_left_out(tmp_path: Path, save_tensors: Callable[..., Path]) -> None:
    plain = save_model(tmp_path / "plain", LLAMA)
    tensors = load_file(plain / "model.safetensors") | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    from_hf(save_tensors("model", tensors, {"config.json": LLAMA}), tmp_path / "out", to="meta")
    assert "rope.freqs" not in torch.load(tmp_path / "out" / "consolidated.00.pth", weights_only=True)
