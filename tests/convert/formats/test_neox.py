"""GPT-NeoX: transformers' models, divided over ranks as GPT-NeoX does, come back bit for bit and compute the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from llmconv.checkpoint import open_checkpoint
from llmconv.convert import to_hf
from llmconv.convert.formats import formats
from llmconv.convert.inspection import inspect
from llmconv.convert.opening import open_training
from llmconv.errors import InputRefused, LlmconvError, MalformedInput, UnsupportedInput
from llmconv.files.safetensors_file import FileTensor
from tests.builders.neox_saves import KINDS, logits, save_neox, split, state_of, write
from tests.builders.slow_rows import slow_but
from tests.builders.torch_states import FIXTURES

IDS = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6, 5, 3])
STEP = "global_step7"
ROWS = [(name, ranks) for name, kind in KINDS.items() for ranks in kind.ranks]


@pytest.mark.parametrize(("name", "ranks"), ROWS)
def test_a_model_comes_back_bit_for_bit(tmp_path: Path, name: str, ranks: int) -> None:
    state = state_of(KINDS[name])
    run = save_neox(tmp_path / "run", name, ranks, pipeline=ranks != 2)
    found = open_training(run)
    tied = not KINDS[name].all_arguments["no-weight-tying"]
    assert set(found) == {one for one in state if not (tied and one == "embed_out.weight")}
    assert found.config["tie_word_embeddings"] is tied
    for one, tensor in found.items():
        assert np.array_equal(tensor.read(), state[one].numpy()), one


@pytest.mark.parametrize("ranks", slow_but([1, 2, 4], 2))
@pytest.mark.parametrize("name", KINDS)
def test_logits_are_those_of_gpt_neox(tmp_path: Path, logits_of: Callable[..., Any], name: str, ranks: int) -> None:
    kind = KINDS[name]
    parts = split(state_of(kind), kind, ranks)
    to_hf(write(tmp_path / "run", parts, kind.all_arguments), tmp_path / "hf")
    expected = logits(parts, kind, IDS).numpy()
    assert np.abs(logits_of(tmp_path / "hf", IDS[None])[0] - expected).max() < 2e-5 * np.abs(expected).max()


def test_files_of_deepspeeds_own_pipeline_are_read() -> None:
    """`tests/fixtures/neox`: no file of the tied head, which DeepSpeed does not save again."""
    found = open_training(FIXTURES / "neox" / "run")
    state = torch.load(FIXTURES / "neox" / "state.pt")
    assert len(found) == 15 and found.version.startswith("deepspeed 0.1") and found.config["tie_word_embeddings"]
    assert np.array_equal(
        found["gpt_neox.embed_in.weight"].read(), state["tied_modules.embed.word_embeddings.weight"].numpy()
    )
    assert np.array_equal(
        found["gpt_neox.layers.0.mlp.dense_h_to_4h.weight"].read(), state["2.mlp.linear1.weight"].numpy()
    )


def step_of(tmp_path: Path, name: str = "neox", ranks: int = 1, **changes: Any) -> Path:
    return save_neox(tmp_path / "run", name, ranks, **changes) / STEP


@pytest.mark.parametrize("pipeline", [True, False])
def test_only_this_format_claims_run_and_step(tmp_path: Path, *, pipeline: bool) -> None:
    step = step_of(tmp_path, pipeline=pipeline)
    for path in (step, step.parent, Path(f"{step.parent}/")):
        assert [name for name, found in formats().items() if found.detect(path)] == ["neox"]
        assert len(open_training(path)) == 28
        assert inspect(path).summary()["format"] == "neox"


def test_tensors_of_one_rank_are_mapped_as_they_lie(tmp_path: Path) -> None:
    assert all(isinstance(tensor, FileTensor) for tensor in open_training(step_of(tmp_path)).values())


def test_the_tied_embedding_may_lie_at_the_end_again(tmp_path: Path) -> None:
    step = step_of(tmp_path, "neox: fused gelu")
    copy = torch.load(step / "layer_00-model_00-model_states.pt")
    torch.save(copy, step / "layer_06-model_00-model_states.pt")
    to_hf(step, tmp_path / "hf")
    written = open_checkpoint(tmp_path / "hf")
    assert "embed_out.weight" not in written and written.config["tie_word_embeddings"] is True


def change(step: Path, module: int, name: str, value: Callable[[Any], Any], rank: int = 0) -> None:
    """Replaces a tensor of a rank; a value of None removes it."""
    file = step / f"layer_{module:02d}-model_{rank:02d}-model_states.pt"
    content = torch.load(file)
    content[name] = value(content.get(name))
    torch.save({one: tensor for one, tensor in content.items() if tensor is not None}, file)


def test_equal_norms_are_the_first_and_others_are_averaged_with_a_warning(tmp_path: Path) -> None:
    step = step_of(tmp_path, ranks=2)
    assert not any("mean" in warning for warning in open_training(step).warnings)
    change(step, 3, "input_layernorm.weight", lambda norm: norm + 0.5, rank=1)
    found = open_training(step)
    assert any("1 copies that differ" in warning and "input_layernorm.weight" in warning for warning in found.warnings)
    norms = [torch.load(step / f"layer_03-model_0{rank}-model_states.pt")["input_layernorm.weight"] for rank in (0, 1)]
    expected = (norms[0].double() + norms[1].double()).div(2).float().numpy()
    assert np.array_equal(found["gpt_neox.layers.1.input_layernorm.weight"].read(), expected)


def test_biases_of_a_residual_in_turn_are_taken_once_though_upstream_sums_them(tmp_path: Path) -> None:
    step = step_of(tmp_path, "neox: in turn", ranks=2)
    own = torch.load(step / "layer_02-model_00-model_states.pt")["attention.dense.bias"]
    assert np.array_equal(open_training(step)["gpt_neox.layers.0.attention.dense.bias"].read(), own.numpy())


def test_a_head_that_was_divided_by_columns_is_joined_by_columns(tmp_path: Path) -> None:
    """`output_layer_parallelism: row`, the default until 2023."""
    kind = KINDS["neox"]
    state = state_of(kind)
    parts = split(state, kind, 2)
    for rank in range(2):
        parts[6, rank]["final_linear.weight"] = state["embed_out.weight"].chunk(2, 1)[rank].clone()
    found = open_training(write(tmp_path, parts, {**kind.all_arguments, "output_layer_parallelism": "row"}))
    assert np.array_equal(found["embed_out.weight"].read(), state["embed_out.weight"].numpy())


def test_buffers_of_older_versions_are_left_out(tmp_path: Path) -> None:
    step = step_of(tmp_path)
    change(step, 2, "attention.rotary_emb.inv_freq", lambda _: torch.ones(1))
    change(step, 2, "attention.dense._extra_state", lambda _: torch.ones(1))
    assert len(open_training(step)) == 28


def test_norms_of_transformer_engine_are_in_a_module_of_their_own(tmp_path: Path) -> None:
    kind = KINDS["neox"]
    parts = split(state_of(kind), kind, 1)
    for place, tensors in parts.items():
        parts[place] = {name.replace("norm.", "norm.norm."): one for name, one in tensors.items()}
    assert len(open_training(write(tmp_path, parts, {**kind.all_arguments, "norm": "te_layernorm"}))) == 28


def test_the_dtype_of_the_run_is_kept(tmp_path: Path) -> None:
    kind = KINDS["neox"]
    parts = split(state_of(kind, torch.bfloat16), kind, 2)
    found = open_training(write(tmp_path, parts, kind.all_arguments))
    assert {tensor.dtype.name for tensor in found.values()} == {"bfloat16"}


def test_defaults_are_those_of_gpt_neox(tmp_path: Path) -> None:
    no_part: dict[str, Any] = {"rotary-pct": None}
    plain = open_training(step_of(tmp_path, "neox: in turn", **no_part)).config
    assert (plain["rotary_pct"], plain["rotary_emb_base"], plain["layer_norm_eps"]) == (1.0, 10000.0, 1e-5)
    assert (plain["hidden_act"], plain["use_parallel_residual"]) == ("gelu", False)
    assert open_training(step_of(tmp_path / "2", "llama", rms_norm_epsilon=None)).config["rms_norm_eps"] == 1e-8


def test_the_vocabulary_keeps_its_padding(tmp_path: Path) -> None:
    assert open_training(step_of(tmp_path, make_vocab_size_divisible_by=128)).config["vocab_size"] == 24


def test_what_a_version_computed_otherwise_is_a_warning(tmp_path: Path) -> None:
    for number, (name, words) in enumerate(
        {"llama: fewer keys": "14 November", "llama of 2023": "to the root"}.items()
    ):
        assert any(words in warning for warning in open_training(step_of(tmp_path / str(number), name)).warnings)
    fused = open_training(step_of(tmp_path / "fused", "llama", rmsnorm_fusion=True))
    assert not any("to the root" in warning for warning in fused.warnings)


def test_the_tokenizer_of_the_run_is_found_by_its_name(tmp_path: Path) -> None:
    step = step_of(tmp_path, tokenizer_type="HFTokenizer")
    tokens = {"added_tokens": [{"id": 3, "content": "<|endoftext|>", "special": True}], "model": {"vocab": {"a": 0}}}
    (step.parent / "words.json").write_text(json.dumps(tokens))
    found = open_training(step.parent)
    assert "tokenizer.json" in found.side_files and found.config["eos_token_id"] == 3


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "learned positions": ("neox", {"pos-emb": "learned"}, "`pos_emb`"),
    "no positions given": ("neox", {"pos-emb": None}, "'learned'"),
    "alibi": ("neox", {"pos-emb": "alibi"}, "`pos_emb`"),
    "one norm": ("neox", {"gpt_j_tied": True}, "`gpt_j_tied`"),
    "norms of queries": ("neox", {"use_qk_layernorm": True}, "`use_qk_layernorm`"),
    "experts": ("neox", {"moe_num_experts": 4}, "`moe_num_experts`"),
    "mamba": ("neox", {"attention_config": [[["mamba"], 2]]}, "`attention_config`"),
    "sparse": ("neox", {"attention_config": [[["global", "sparse_fixed"], 1]]}, "`attention_config`"),
    "muP": ("neox", {"use-mup": True}, "`use_mup`"),
    "a soft prompt": ("neox", {"soft_prompt_tuning": {"enabled": True}}, "`soft_prompt_tuning`"),
    "shared layers": ("neox", {"num-unique-layers": 1}, "`num_unique_layers`"),
    "a reward model": ("neox", {"train_impl": "rm"}, "`train_impl`"),
    "norms without weights": ("neox", {"norm": "non_parametric_layernorm"}, "'non_parametric_layernorm'"),
    "RMSNorm without a gate": ("neox", {"norm": "rmsnorm"}, "without a gate"),
    "LayerNorm with a gate": ("llama", {"norm": "layernorm"}, "with a gate"),
    "another gate": ("llama", {"activation": "geglu"}, "'geglu'"),
    "softsign": ("neox", {"activation": "softsign"}, "'softsign'"),
    "a parallel Llama": ("llama", {"gpt_j_residual": True}, "`gpt_j_residual`"),
    "a part of the head": ("llama", {"rotary-pct": 0.5}, "`rotary_pct`"),
    "fewer keys": ("neox", {"num_kv_heads": 4}, "`num_kv_heads`"),
    "a window": ("neox", {"sliding_window_width": 4}, "`sliding_window_width`"),
    "a window of a fused kernel": (
        "mistral",
        {"attention-config": None, "scaled-upper-triang-masked-softmax-fusion": True},
        "kernel",
    ),
    "a window with biases": ("llama: biases", {"sliding_window_width": 4}, "Mistral does not"),
    "TransformerEngine's attention": ("neox", {"te_mha": True}, "`te_mha`"),
    "TransformerEngine's MLP": ("neox", {"te_layernorm_mlp": True}, "`te_layernorm_mlp`"),
    "residuals after the norm": ("neox", {"apply-residual-connection-post-layernorm": True}, "after the norm"),
    "an unknown field": ("neox", {"logit_softcap": 30.0}, "logit_softcap"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_class_of_transformers_computes_is_refused_by_its_name(tmp_path: Path, case: str) -> None:
    name, changes, words = REFUSED[case]
    with pytest.raises(UnsupportedInput, match=words):
        open_training(step_of(tmp_path, name, **changes))


def test_an_unknown_field_that_is_off_is_no_obstacle(tmp_path: Path) -> None:
    assert len(open_training(step_of(tmp_path, logit_softcap=None, new_kernel=False))) == 28


def test_outputs_of_transformer_engine_that_are_added_up_twice_are_refused(tmp_path: Path) -> None:
    assert len(open_training(step_of(tmp_path, te_rowparallel=True))) == 28
    with pytest.raises(UnsupportedInput, match="twice"):
        open_training(step_of(tmp_path / "2", ranks=2, te_rowparallel=True))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("layer_00-model_00-model_states.pt", "module 0 of tensor rank 0"),
        ("layer_03-model_01-model_states.pt", "module 3 of tensor rank 1"),
        ("layer_05-model_00-model_states.pt", "module 5 of tensor rank 0"),
        ("layer_06-model_01-model_states.pt", "module 6 of tensor rank 1"),
    ],
)
def test_a_missing_file_is_named(tmp_path: Path, name: str, words: str) -> None:
    step = step_of(tmp_path, ranks=2)
    (step / name).unlink()
    with pytest.raises(InputRefused, match=words):
        open_training(step)


def test_a_missing_rank_without_pipeline_is_named(tmp_path: Path) -> None:
    step = step_of(tmp_path, ranks=2, pipeline=False)
    (step / "mp_rank_01_model_states.pt").unlink()
    with pytest.raises(InputRefused, match=r"mp_rank_01_model_states\.pt.*there are.*mp_rank_00"):
        open_training(step)


def test_a_run_without_its_configuration_says_what_to_copy(tmp_path: Path) -> None:
    step = step_of(tmp_path)
    (step / "configs").rename(step.parent / "configs")
    assert len(open_training(step)) == 28  # of the run, as in the released 20B
    (step.parent / "configs").rename(tmp_path / "configs")
    with pytest.raises(InputRefused, match="no `configs`") as found:
        open_training(step)
    assert "YAML" in (found.value.hint or "")


@pytest.mark.parametrize(
    "changes",
    [
        {"num-layers": 1},
        {"num-layers": 3},
        {"num-layers": 1 << 30},
        {"num-layers": "2"},
        {"num-attention-heads": 16},
        {"num-attention-heads": 0},
        {"hidden-size": 64},
        {"max-position-embeddings": None},
        {"rotary-pct": 7},
        {"rotary-emb-base": "many"},
        {"no-weight-tying": False},
        {"norm": 3},
        {"vocab-file": [1]},
    ],
    ids=str,
)
def test_a_configuration_of_another_model_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    run = save_neox(tmp_path / "run")
    file = run / STEP / "configs" / "model.yml"
    file.write_text(yaml.safe_dump({**yaml.safe_load(file.read_text()), **changes}))
    with pytest.raises(LlmconvError) as found:
        to_hf(run, tmp_path / "hf")
    assert found.value.message.isprintable() and not (tmp_path / "hf").exists()


@pytest.mark.parametrize(
    "harm",
    [
        lambda step: change(step, 2, "mlp.linear1.weight", lambda weight: weight[:3], rank=1),
        lambda step: change(step, 2, "attention.dense.bias", lambda bias: bias[:3], rank=1),
        lambda step: change(step, 2, "mlp.extra.weight", lambda _: torch.ones(2)),
        lambda step: change(step, 2, "mlp.linear1.bias", lambda _: None, rank=1),
        lambda step: change(step, 0, "word_embeddings.weight", lambda _: None),
        lambda step: change(step, 5, "extra.weight", lambda _: torch.ones(2)),
        lambda step: change(step, 0, "word_embeddings.weight", lambda _: torch.tensor(1.0)),
    ],
)
def test_files_that_do_not_fit_are_refused(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    step = step_of(tmp_path, ranks=2)
    harm(step)
    with pytest.raises(MalformedInput):
        to_hf(step, tmp_path / "hf")


def test_two_values_of_a_field_are_refused(tmp_path: Path) -> None:
    step = step_of(tmp_path)
    (step / "configs" / "more.yml").write_text("hidden_size: 64\n")
    with pytest.raises(MalformedInput, match="two values of `hidden_size`"):
        open_training(step)


def test_layers_of_megatron_deepspeed_are_refused_by_their_name(tmp_path: Path) -> None:
    torch.save({"word_embeddings.weight": torch.ones(4, 2)}, tmp_path / "layer_01-model_00-model_states.pt")
    torch.save({"self_attention.dense.weight": torch.ones(2, 2)}, tmp_path / "layer_03-model_00-model_states.pt")
    with pytest.raises(UnsupportedInput, match="Megatron-DeepSpeed"):
        open_training(tmp_path)
