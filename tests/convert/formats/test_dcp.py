"""Plain distributed checkpoints: wherever the model lies in them it is found, and what is no such model is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig

from llmconv.convert import merge_lora, to_hf
from llmconv.convert.formats import formats
from llmconv.convert.formats.meta import LLAMA
from llmconv.convert.inspection import inspect
from llmconv.convert.models.head_and_dtype import settled
from llmconv.convert.opening import open_training
from llmconv.errors import InputRefused, MalformedInput, UnsupportedInput
from tests.builders.dcp_folders import change, save
from tests.builders.dcp_ranks import save_sharded
from tests.builders.rank_saves import SIZES
from tests.convert.formats.test_composer import CONFIG, state_dict

FSDP = "pytorch_model_fsdp_0"


@pytest.mark.quick_rows("pytorch_model_fsdp_0")
@pytest.mark.parametrize("inside", ["", FSDP])
def test_logits_of_a_sharded_model_are_those_it_had(
    dcp: Path, tmp_path: Path, logits_of: Callable[..., Any], inside: str
) -> None:
    to_hf(dcp / "fsdp_llama" / inside, tmp_path / "hf")
    with np.load(dcp / "fsdp_llama" / "reference.npz") as reference:
        logits = logits_of(tmp_path / "hf", reference["input_ids"])
        assert np.abs(logits - reference["logits"]).max() < 1e-5


def test_shards_and_dropped_parts_are_reported(dcp: Path) -> None:
    checkpoint = open_training(dcp / "fsdp_llama")
    assert (checkpoint.format, checkpoint.shards) == ("dcp", 4)
    assert checkpoint.version == "torch distributed checkpoint 1.0.0"
    assert checkpoint.dropped == ("the optimizer's state (358 kB)",)


def test_inspecting_needs_no_shard_to_be_readable(dcp: Path, tmp_path: Path) -> None:
    shutil.copytree(dcp / "fsdp_llama", tmp_path / "x")
    for shard in (tmp_path / "x" / FSDP).glob("*.distcp"):
        shard.write_bytes(bytes(shard.stat().st_size))
    assert inspect(tmp_path / "x").parameters == 5_520


def test_without_a_configuration_inspect_lists_the_tensors(tmp_path: Path) -> None:
    found = inspect(save(tmp_path / "x", {"model": state_dict()}))
    assert f"model.{next(iter(state_dict()))}" in found.tensors
    assert "does not contain a model configuration" in found.warnings[0]


def test_other_models_are_listed_and_an_optimizer_alone_is_refused(dcp: Path, tmp_path: Path) -> None:
    assert inspect(dcp / "grids").tensors["model.grid"].shape == (5, 6)
    with pytest.raises(UnsupportedInput, match="no language model"):
        inspect(save(tmp_path / "x", OTHER))


@pytest.fixture
def config(tmp_path: Path) -> tuple[Path, ...]:
    (tmp_path / "llama.json").write_text(json.dumps(CONFIG))
    return (tmp_path / "llama.json",)


def opened(path: Path, config: tuple[Path, ...], **options: Any) -> Mapping[str, Any]:
    found = settled(open_training(path, config=config, options=options))
    return {name: tensor.read() for name, tensor in found.items()}


def assert_equal(found: Mapping[str, Any], expected: Mapping[str, torch.Tensor]) -> None:
    assert set(found) == set(expected)
    assert all(np.array_equal(found[name], tensor.numpy()) for name, tensor in expected.items())


OTHER = {"optimizer": {"state": {"model.embed_tokens.weight": {"exp_avg": torch.ones(8, 4)}}}, "step": 3}
PLACES: dict[str, Callable[[dict[str, torch.Tensor]], dict[str, Any]]] = {
    "model": lambda state: {"model": state, **OTHER},
    "app.model": lambda state: {"app": {"model": state, "optim": OTHER["optimizer"]}},
    "state_dict": lambda state: {"state_dict": state, "epoch": 1},
    "module": lambda state: {"module": state},
    "the root": lambda state: {**state, **OTHER},
    "state.model of no Composer": lambda state: {"state": {"model": state}},
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES.keys())
def test_the_model_is_found_wherever_it_lies(
    tmp_path: Path, config: tuple[Path, ...], place: Callable[[dict[str, torch.Tensor]], dict[str, Any]]
) -> None:
    assert_equal(opened(save(tmp_path / "x", place(state_dict())), config), state_dict())


@pytest.mark.parametrize("prefix", ["model.", "_orig_mod.", "module._orig_mod.", "lit.model.", "model.module."])
def test_prefixes_of_wrappers_and_trainers_are_removed(tmp_path: Path, config: tuple[Path, ...], prefix: str) -> None:
    state = {prefix + name: tensor for name, tensor in state_dict().items()}
    assert_equal(opened(save(tmp_path / "x", {"model": state}), config), state_dict())


@pytest.mark.parametrize("prefix", ["", "model."])
def test_a_model_whose_head_is_tied_keeps_its_own_prefix(tmp_path: Path, prefix: str) -> None:
    state = {name: tensor for name, tensor in state_dict().items() if name != "lm_head.weight"}
    path = save(tmp_path / "x", {prefix + name: tensor for name, tensor in state.items()})
    (path / "config.json").write_text(json.dumps({**CONFIG, "tie_word_embeddings": True}))
    assert_equal(opened(path, ()), state)


def test_a_head_stored_twice_is_dropped_where_the_configuration_ties_it(tmp_path: Path) -> None:
    state = {**state_dict(), "lm_head.weight": state_dict()["model.embed_tokens.weight"]}
    path = save(tmp_path / "x", {"model": state})
    (path / "config.json").write_text(json.dumps({**CONFIG, "tie_word_embeddings": True}))
    del state["lm_head.weight"]
    assert_equal(opened(path, ()), state)


def test_configuration_and_tokenizer_next_to_the_folder_are_used(tmp_path: Path, config: tuple[Path, ...]) -> None:
    path = save(tmp_path / "x", state_dict())
    config[0].rename(tmp_path / "config.json")
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert open_training(path).side_files == {"tokenizer_config.json": b"{}"}
    for file in (tmp_path / "generation_config.json", tmp_path / "tokenizer.json"):
        file.write_text("[]")
    found = open_training(path, tokenizer=tmp_path / "tokenizer.json").side_files
    assert found == {"generation_config.json": b"[]", "tokenizer.json": b"[]"}


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a query or key matrix from Hugging Face's order (halves) into Meta's (neighbors)."""
    rows, columns = weight.shape
    return weight.view(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns)


def titan(state: Mapping[str, torch.Tensor], heads: int) -> dict[str, torch.Tensor]:
    """A Llama as torchtitan names and orders it."""
    back = {target.format(0): name.format(0) for name, target in LLAMA.items() if target}
    turned = ("q_proj.weight", "k_proj.weight")
    return {
        back[name]: interleaved(tensor, heads) if name.endswith(turned) else tensor for name, tensor in state.items()
    }


def test_a_llama_of_torchtitan_is_turned_into_hugging_faces(tmp_path: Path) -> None:
    sized = {**CONFIG, "num_attention_heads": 1}
    state = {**titan(state_dict(), heads=1), "freqs_cis": torch.ones(4, 2, dtype=torch.complex64)}
    path = save(tmp_path / "x", {**state, "lr_scheduler": {"last_epoch": 1}})
    (path / "config.json").write_text(json.dumps(sized))
    assert_equal(opened(path, ()), state_dict())


def qwen(stacked: bool = False) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The configuration and the weights of a Qwen 3 with four queries and two keys, with experts if `stacked`."""
    random = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (8, 4), "lm_head": (8, 4), "model.norm": (4,)}
    layer: dict[str, tuple[int, ...]] = {"self_attn.q_proj": (16, 4)}
    layer |= {"self_attn.k_proj": (8, 4), "self_attn.v_proj": (8, 4)}
    layer |= {"self_attn.o_proj": (4, 16), "self_attn.q_norm": (4,), "self_attn.k_norm": (4,)}
    layer |= {"input_layernorm": (4,), "post_attention_layernorm": (4,)}
    feed: dict[str, tuple[int, ...]] = {"gate_proj": (6, 4), "up_proj": (6, 4), "down_proj": (4, 6)}
    of_experts = {f"mlp.experts.{at}.{name}": shape for at in range(3) for name, shape in feed.items()}
    layer |= {**of_experts, "mlp.gate": (3, 4)} if stacked else {f"mlp.{name}": shape for name, shape in feed.items()}
    shapes |= {f"model.layers.0.{name}": shape for name, shape in layer.items()}
    config = {"model_type": "qwen3_moe" if stacked else "qwen3", "vocab_size": 8, "hidden_size": 4, "head_dim": 4}
    config |= {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 6}
    config |= {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 6} if stacked else {}
    state = {f"{name}.weight": torch.randn(shape, generator=random) for name, shape in shapes.items()}
    return {**config, "tie_word_embeddings": False}, state


OWN_NAMES = {
    "model.": "",
    "embed_tokens": "tok_embeddings",
    "self_attn.o_proj": "attention.wo",
    "self_attn": "attention",
    "attention.q_proj": "attention.wq",
    "attention.k_proj": "attention.wk",
    "attention.v_proj": "attention.wv",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "lm_head": "output",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.gate.": "moe.router.gate.",
}


def titan_qwen(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A Qwen 3 as torchtitan names it; rows keep their order."""
    found = {}
    for name, tensor in state.items():
        for one, other in OWN_NAMES.items():
            name = name.replace(one, other, 1)
        found[name] = tensor
    for weight, projection in {"w1": "gate", "w2": "down", "w3": "up"}.items():
        names = [f"layers.0.mlp.experts.{at}.{projection}_proj.weight" for at in range(3)]
        if names[0] in found:
            found[f"layers.0.moe.experts.{weight}"] = torch.stack([found.pop(name) for name in names])
    return found


def newer(state: Mapping[str, torch.Tensor], queries: int, dim: int) -> dict[str, torch.Tensor]:
    """Names since 2026, with q, k and v of each layer as one matrix: `queries` heads of a key, it, its value."""
    found = {name.replace("output.", "lm_head."): tensor for name, tensor in state.items()}
    for name in [name for name in found if name.endswith("attention.wq.weight")]:
        q, k, v = (found.pop(name.replace("wq", one)) for one in ("wq", "wk", "wv"))
        parts = [(q, queries * dim), (k, dim), (v, dim)]
        rows = [one[at * size : (at + 1) * size] for at in range(len(k) // dim) for one, size in parts]
        found[name.replace("wq", "qkv_linear.wqkv")] = torch.cat(rows)
    return found


@pytest.mark.parametrize("stacked", [False, True])
def test_a_qwen_3_of_torchtitan_keeps_the_order_of_its_rows(tmp_path: Path, stacked: bool) -> None:
    settings, state = qwen(stacked)
    for at, own in enumerate((titan_qwen(state), newer(titan_qwen(state), 2, 4))):
        more = {"layers.0.moe.expert_bias": torch.zeros(3), "layers.0.moe.tokens_per_expert": torch.ones(3)}
        path = save(tmp_path / str(at), {**own, **(more if stacked else {})})
        (path / "config.json").write_text(json.dumps(settings))
        assert_equal(opened(path, ()), state)


def test_newer_names_of_a_llama_of_torchtitan_are_read(tmp_path: Path) -> None:
    path = save(tmp_path / "x", newer(titan(state_dict(), heads=1), 1, 4))
    (path / "config.json").write_text(json.dumps({**CONFIG, "num_attention_heads": 1}))
    assert_equal(opened(path, ()), state_dict())


def test_experts_that_a_bias_chooses_are_refused(tmp_path: Path) -> None:
    settings, state = qwen(stacked=True)
    path = save(tmp_path / "x", {**titan_qwen(state), "layers.0.moe.expert_bias_E": torch.ones(3)})
    (path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(UnsupportedInput, match="chooses its experts with a bias"):
        opened(path, ())


def test_torchtitans_names_under_another_model_type_are_refused(tmp_path: Path, config: tuple[Path, ...]) -> None:
    config[0].write_text(json.dumps({**CONFIG, "model_type": "mistral"}))
    with pytest.raises(UnsupportedInput, match="its configuration belongs to a `mistral`"):
        opened(save(tmp_path / "x", titan(state_dict(), heads=1)), config)


def test_torchtunes_names_are_refused_and_not_written_as_they_are(tmp_path: Path, config: tuple[Path, ...]) -> None:
    state = {name.replace("attention.w", "attn.w"): tensor for name, tensor in titan(state_dict(), heads=1).items()}
    with pytest.raises(MalformedInput, match="that no rule places"):
        opened(save(tmp_path / "x", {"model": state}), config)


def test_several_models_are_refused_until_one_is_chosen(tmp_path: Path, config: tuple[Path, ...]) -> None:
    ema = {name: tensor + 1 for name, tensor in state_dict().items()}
    path = save(tmp_path / "x", {"app": {"model": state_dict()}, "ema": ema})
    with pytest.raises(InputRefused, match="contains 2 model") as refusal:
        opened(path, config)
    assert "--root app.model" in refusal.value.hint
    assert_equal(opened(path, config, root="ema"), ema)


def test_a_model_at_the_root_is_chosen_by_a_dot(tmp_path: Path, config: tuple[Path, ...]) -> None:
    path = save(tmp_path / "x", {**state_dict(), "ema": state_dict()})
    assert_equal(opened(path, config, root="."), state_dict())
    with pytest.raises(InputRefused, match=r"`\.`, `ema`"):
        opened(path, config, root="nothing")


def test_tensors_outside_the_model_are_refused_until_they_are_dropped(tmp_path: Path, config: tuple[Path, ...]) -> None:
    state = {f"lit.{name}": tensor for name, tensor in state_dict().items()} | {"metric.total": torch.ones(1)}
    path = save(tmp_path / "x", {"model": state})
    with pytest.raises(UnsupportedInput, match=r"outside the model: `metric\.total`"):
        opened(path, config)
    assert_equal(opened(path, config, drop=True), state_dict())


def test_an_optimizers_folder_is_refused(tmp_path: Path, config: tuple[Path, ...]) -> None:
    with pytest.raises(UnsupportedInput, match="contains no language model; it has `optimizer`, `step`"):
        opened(save(tmp_path / "x", OTHER), config)


def test_lora_without_its_config_is_refused(tmp_path: Path, config: tuple[Path, ...]) -> None:
    state = {**state_dict(), "model.layers.0.self_attn.q_proj.lora_A.default.weight": torch.ones(2, 4)}
    with pytest.raises(MalformedInput, match="adapter that is not merged"):
        opened(save(tmp_path / "x", {"model": state}), config)


@pytest.mark.parametrize(
    "case", ["dcp/fsdp_llama", f"dcp/fsdp_llama/{FSDP}", "dcp/grids", "composer/sharded_dcp/ep0-ba2"]
)
def test_one_format_claims_a_folder(dcp: Path, case: str) -> None:
    claims = [name for name, format in formats().items() if format.detect(dcp.parent / case)]
    assert claims == [case.partition("/")[0]]


@pytest.mark.parametrize("place", ["trainer", "policy/weights"])
def test_the_folder_of_a_step_names_the_checkpoint_inside(place: str, dcp: Path, tmp_path: Path) -> None:
    inner = shutil.copytree(next((dcp / "fsdp_llama").rglob(".metadata")).parent, tmp_path / "step_10" / place)
    with pytest.raises(
        InputRefused, match=f"`step_10` is not a checkpoint itself; `{place}` in it is a distributed one"
    ) as caught:
        open_training(tmp_path / "step_10")
    assert str(inner) in caught.value.hint


def slime_run(folder: Path, inner: str, steps: Mapping[int, dict[str, torch.Tensor]]) -> Path:
    """What `save` of slime's `backends/fsdp_utils/checkpoint.py` writes; at first the model was in the step itself."""
    for step, state in steps.items():
        home = folder / f"iter_{step:07d}"
        if inner:
            save(home / inner, {"model_state": {"model": state}})
            save(home / "optimizer", {"optim_state": {"optim": OTHER["optimizer"]}})
            save(home / "lr_scheduler", {"lr_scheduler_state": {"lr_scheduler": {"last_epoch": step}}})
        else:
            save(home, {"app": {"model": state, "optim": OTHER["optimizer"]}})
        torch.save({"torch": torch.get_rng_state()}, home / "rng.pt")
        (home / "meta.json").write_text(json.dumps({"iteration": step, "world_size": 1}))
        (folder / "latest_checkpointed_iteration.txt").write_text(str(step))
    return folder


@pytest.mark.parametrize("inner", ["model", ""])
def test_the_newest_step_of_a_run_of_slime_is_read(inner: str, tmp_path: Path, config: tuple[Path, ...]) -> None:
    older = {name: tensor + 1 for name, tensor in state_dict().items()}
    run = slime_run(tmp_path / "run", inner, {5: older, 10: state_dict()})
    assert [name for name, format in formats().items() if format.detect(run)] == ["dcp"]
    assert_equal(opened(run, config), state_dict())
    assert_equal(opened(run / "iter_0000010", config), state_dict())
    assert_equal(opened(run / "iter_0000005", config), older)
    (run / "latest_checkpointed_iteration.txt").write_text("5")
    assert_equal(opened(run, config), older)


def test_a_run_of_slime_whose_step_is_missing_is_refused(tmp_path: Path, config: tuple[Path, ...]) -> None:
    run = slime_run(tmp_path / "run", "model", {5: state_dict(), 10: state_dict()})
    shutil.rmtree(run / "iter_0000010")
    with pytest.raises(MalformedInput, match="names 'iter_0000010', which is not a save in it"):
        opened(run, config)
    (run / "latest_checkpointed_iteration.txt").unlink()
    assert_equal(opened(run, config), state_dict())


def without_version(metadata: Any) -> None:
    """As torch before 2.8 writes it."""
    del metadata.version


def test_an_order_of_parts_that_early_torch_states_wrongly_is_refused(dcp: Path, tmp_path: Path) -> None:
    """The same places are right where a tensor was sharded in the order of its mesh, as later torches say."""
    path = Path(shutil.copytree(dcp / "grids", tmp_path / "x"))
    assert inspect(path).tensors
    with pytest.raises(UnsupportedInput, match=r"sharded twice along one dim by a torch before 2\.5"):
        inspect(change(path, without_version))


@pytest.mark.slow
@pytest.mark.parametrize("early", [True, False])
def test_fsdp_over_tensor_parallelism_is_read_or_refused(early: bool, tmp_path: Path) -> None:
    state = save_sharded(tmp_path / "x", early=early)
    (tmp_path / "x" / "config.json").write_text(json.dumps({**LlamaConfig(**SIZES).to_dict()}))
    change(tmp_path / "x", without_version)
    if early:
        with pytest.raises(UnsupportedInput, match=r"`model\.layers.*gate_proj\.weight` in `x` is sharded twice"):
            opened(tmp_path / "x", ())
    else:
        assert_equal(opened(tmp_path / "x", ()), state)


def test_the_step_of_nemo_rl_is_refused_with_the_folder_of_its_weights(dcp: Path, tmp_path: Path) -> None:
    policy = tmp_path / "step_3/policy"
    inner = shutil.copytree(next((dcp / "fsdp_llama").rglob(".metadata")).parent, policy / "weights")
    shutil.copytree(inner, policy / "optimizer")
    (policy / "tokenizer").mkdir()
    torch.save({"state": 1}, tmp_path / "step_3/train_dataloader.pt")
    torch.save({"step": 3}, tmp_path / "step_3/notes.pt")
    for folder in (tmp_path, tmp_path / "step_3", policy):
        with pytest.raises(InputRefused, match="`weights` in it|`.*policy/weights` in it") as caught:
            open_training(folder)
        assert f"give that folder: `{inner}`" in caught.value.hint
        assert f"`--tokenizer {policy / 'tokenizer'}`" in caught.value.hint


def test_an_adapter_saved_without_its_base_is_merged_into_it(dcp: Path, tmp_path: Path) -> None:
    """As accelerate saves a LoRA run in shards (`adapter_only`): `adapter_config.json` is in the run's folder above."""
    base = tmp_path / "base"
    to_hf(dcp / "fsdp_llama", base)
    weights = load_file(base / "model.safetensors")
    module = "model.layers.0.self_attn.q_proj"
    rows, columns = weights[f"{module}.weight"].shape
    a, b = torch.randn(2, columns), torch.randn(rows, 2)
    factors = {f"base_model.model.{module}.lora_A.weight": a, f"base_model.model.{module}.lora_B.weight": b}
    step = tmp_path / "run/checkpoint-100"
    save(step / FSDP, {"model": factors})
    with pytest.raises(InputRefused, match="is of the format `dcp`, with an adapter") as caught:
        merge_lora(base, [step], tmp_path / "refused")
    assert f"`llmconv to-hf {step} --base {base} -o OUT`" in caught.value.hint
    with pytest.raises(MalformedInput, match="their scale is unknown"):
        to_hf(step, tmp_path / "refused", base=base)
    fields = {"peft_type": "LORA", "r": 2, "lora_alpha": 8, "target_modules": r"model\.layers\.0\.self_attn\.q_proj"}
    (tmp_path / "run/adapter_config.json").write_text(json.dumps(fields))
    to_hf(step, tmp_path / "hf", base=base)
    merged = load_file(tmp_path / "hf/model.safetensors")
    expected = weights[f"{module}.weight"].double() + 4 * b.double() @ a.double()
    assert torch.allclose(merged[f"{module}.weight"].double(), expected, atol=1e-6)
    others = [name for name in weights if not name.startswith(module)]
    assert all(torch.equal(merged[name], weights[name]) for name in others)
