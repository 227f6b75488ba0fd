"""Safetensors of any trainer: accelerate's own saves become the model that was saved, bit for bit."""

from __future__ import annotations

import importlib
import json
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file, save_model
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_state
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertLMHeadModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from llmconv.checkpoint import open_checkpoint
from llmconv.convert import to_hf
from llmconv.convert.adapters.peft_file import plain_name
from llmconv.convert.formats import detect, formats
from llmconv.convert.from_hugging_face import open_model
from llmconv.convert.inspection import inspect
from llmconv.convert.models.head_and_dtype import settled
from llmconv.convert.opening import open_training
from llmconv.errors import InputRefused, MalformedInput, UnsupportedInput
from llmconv.export import export
from tests.builders.dcp_folders import save
from tests.builders.torch_states import LLAMA, llama_state, prefixed

ROPE = {"num_attention_heads": 2, "num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 24, "vocab_size": 64}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**ROPE)),
    "llama, tied": lambda: LlamaForCausalLM(LlamaConfig(**ROPE, tie_word_embeddings=True)),
    "gpt2, tied": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=1)
    ),
    "bert, two shared tensors": lambda: BertLMHeadModel(BertConfig(**ROPE, is_decoder=True)),
}


def built(name: str) -> Any:
    torch.manual_seed(0)
    return MODELS[name]()


@pytest.fixture
def accelerator() -> Any:
    """accelerate in one process on the CPU, forgotten afterwards."""
    accelerate = importlib.import_module("accelerate")  # 2 s that only these tests pay
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield accelerate.Accelerator(cpu=True)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def saved_state(accelerator: Any, model: Any, folder: Path) -> Path:
    """What `save_state` leaves: the model beside optimizer, schedule and random states."""
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
    accelerator.prepare(model, optimizer, schedule)
    accelerator.save_state(str(folder))
    return folder


def saved_model(accelerator: Any, model: Any, folder: Path) -> Path:
    accelerator.save_model(model, str(folder))
    return folder


def saved_shards(accelerator: Any, model: Any, folder: Path) -> Path:
    accelerator.save_model(model, str(folder), max_shard_size="10KB")
    return folder


def saved_file(_: Any, model: Any, folder: Path) -> Path:
    folder.mkdir()
    save_model(model, str(folder / "x.safetensors"))
    return folder / "x.safetensors"


SAVES: dict[str, Callable[[Any, Any, Path], Path]] = {
    "save_state": saved_state,
    "save_model": saved_model,
    "save_model, sharded": saved_shards,
    "safetensors' save_model": saved_file,
}


def assert_same(folder: Path, model: Any) -> None:
    """transformers loads `folder` with nothing missing, as a model of the same bits."""
    found, loading = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(loading.values()), loading
    wanted = model.state_dict()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in found.state_dict().items())


@pytest.mark.slow_rows("bert, two shared tensors-save_state")
@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("name", MODELS)
def test_accelerates_files_become_the_same_model(tmp_path: Path, accelerator: Any, name: str, save: str) -> None:
    model = built(name)
    source = SAVES[save](accelerator, model, tmp_path / "saved")
    model.config.save_pretrained(tmp_path / "config")
    assert [found for found, format in formats().items() if format.detect(source)] == ["safetensors"]
    to_hf(source, tmp_path / "hf", config=[tmp_path / "config" / "config.json"])
    assert_same(tmp_path / "hf", model)


def test_training_files_next_to_the_weights_are_reported(tmp_path: Path, accelerator: Any) -> None:
    model = built("llama")
    source = saved_state(accelerator, model, tmp_path / "saved")
    model.config.save_pretrained(tmp_path / "config")
    found = open_training(source, config=(tmp_path / "config",))
    assert found.dropped == (
        "the optimizer's state (`optimizer.bin`)",
        "the learning-rate schedule (`scheduler.bin`)",
        "random number states (`random_states_0.pkl`)",
    )


@pytest.mark.slow
def test_the_weights_that_accelerate_merges_from_fsdp_become_the_same_model(tmp_path: Path) -> None:
    dcp = importlib.import_module("torch.distributed.checkpoint")
    merge_fsdp_weights = importlib.import_module("accelerate.utils").merge_fsdp_weights
    model = built("llama")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": model.state_dict()}, checkpoint_id=str(tmp_path / "pytorch_model_fsdp_0"))
        merge_fsdp_weights(str(tmp_path / "pytorch_model_fsdp_0"), str(tmp_path / "merged"))
    model.config.save_pretrained(tmp_path / "config")
    to_hf(tmp_path / "merged", tmp_path / "hf", config=[tmp_path / "config"])
    assert_same(tmp_path / "hf", model)


# Files made here


def write(path: Path, state: Mapping[str, Any] | None = None, config: Mapping[str, Any] | None = LLAMA) -> Path:
    """A safetensors file, and `config.json` beside it unless it is None."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(dict(llama_state() if state is None else state), path)
    if config is not None:
        (path.parent / "config.json").write_text(json.dumps(config))
    return path


def write_shards(folder: Path, count: int = 3, stem: str = "model") -> Path:
    names = sorted(llama_state())
    for number in range(count):
        part = {name: llama_state()[name] for name in names[number::count]}
        write(folder / f"{stem}-{number + 1:05}-of-{count:05}.safetensors", part)
    return folder


def test_a_file_of_any_name_takes_the_config_next_to_it(tmp_path: Path) -> None:
    found = open_training(write(tmp_path / "epoch-3.safetensors"))
    assert found.format == "safetensors" and set(found) == set(llama_state())


def test_a_file_without_a_config_is_refused_with_the_option_to_give(tmp_path: Path) -> None:
    with pytest.raises(InputRefused, match="does not contain a model configuration") as caught:
        open_training(write(tmp_path / "model.safetensors", config=None))
    assert "--config" in caught.value.hint


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "model.module."])
def test_the_names_of_wrappers_are_stripped(tmp_path: Path, prefix: str) -> None:
    found = open_training(write(tmp_path / "x.safetensors", prefixed(llama_state(), prefix)))
    assert set(found) == set(llama_state())


def test_a_folder_with_a_config_whose_names_are_wrapped_is_converted(tmp_path: Path) -> None:
    write(tmp_path / "x" / "model.safetensors", prefixed(llama_state(), "module."))
    assert set(open_training(tmp_path / "x")) == set(llama_state())


WRAPPERS = (
    *("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_fpw_module", "_forward_module"),
    *("_orig_module", "pretrained_model"),
)


@pytest.mark.parametrize("wrapped", ["model", "layers.0", "self_attn", "mlp"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_folder_with_wrapped_modules_is_refused_as_a_model_and_converted(
    tmp_path: Path, wrapper: str, wrapped: str
) -> None:
    inside = {name.replace(f"{wrapped}.", f"{wrapped}.{wrapper}.", 1): t for name, t in llama_state().items()}
    write(tmp_path / "x" / "model.safetensors", inside)
    with pytest.raises(MalformedInput, match="names of a trainer's wrappers") as caught:
        open_checkpoint(tmp_path / "x")
    assert f"llmconv to-hf {tmp_path / 'x'}" in caught.value.hint
    assert set(open_training(tmp_path / "x")) == set(llama_state())
    assert {plain_name(name) for name in inside} == set(llama_state())


def test_a_model_under_a_value_head_is_converted_as_the_hint_says(tmp_path: Path) -> None:
    """What TRL's wrapper saves under ZeRO-3: the model's names under `pretrained_model.`, and those of the head."""
    head = {"v_head.summary.weight": torch.ones(1, 4), "v_head.summary.bias": torch.ones(1)}
    write(tmp_path / "x" / "model.safetensors", prefixed(llama_state(), "pretrained_model.") | head)
    with pytest.raises(MalformedInput) as caught:
        open_checkpoint(tmp_path / "x")
    assert f"`llmconv to-hf {tmp_path / 'x'} --drop -o OUT`" in caught.value.hint
    assert set(open_training(tmp_path / "x", options={"drop": True})) == set(llama_state())


@pytest.mark.parametrize("stem", ["model", "pytorch_model", "step-200"])
def test_shards_without_an_index_are_joined(tmp_path: Path, stem: str) -> None:
    found = open_training(write_shards(tmp_path / "x", stem=stem))
    assert set(found) == set(llama_state()) and found.shards == 3


def test_a_missing_shard_without_an_index_is_named(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "x")
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(MalformedInput, match=r"2 of 3 shards \(numbers 1, 3\)"):
        open_training(folder)


def test_missing_shards_of_an_index_are_counted(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "x")
    weight_map = {name: "model-00001-of-00003.safetensors" for name in llama_state()}
    weight_map |= dict.fromkeys(list(weight_map)[:2], "gone-1.safetensors")
    weight_map |= dict.fromkeys(list(weight_map)[2:4], "gone-2.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(MalformedInput, match=r"shard `gone-1\.safetensors` and 1 more of 3 shards are missing"):
        open_checkpoint(folder)


def test_one_shard_alone_names_its_folder(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "x")
    with pytest.raises(InputRefused, match="is one shard of several"):
        open_training(folder / "model-00001-of-00003.safetensors")


def test_two_models_in_one_folder_are_refused_by_name(tmp_path: Path) -> None:
    for name in ("a.safetensors", "b.safetensors"):
        write(tmp_path / "x" / name)
    with pytest.raises(InputRefused, match="contains 2 checkpoint files") as caught:
        open_training(tmp_path / "x")
    assert "b.safetensors" in caught.value.hint


def test_a_tied_model_that_is_saved_under_the_name_of_its_head_is_whole(tmp_path: Path) -> None:
    state = llama_state()
    del state["model.embed_tokens.weight"]
    path = write(tmp_path / "x.safetensors", state, LLAMA | {"tie_word_embeddings": True})
    found = settled(open_training(path))
    assert "lm_head.weight" not in found
    assert torch.equal(torch.from_numpy(found["model.embed_tokens.weight"].read()), state["lm_head.weight"])


def test_a_model_that_is_not_tied_needs_its_embedding(tmp_path: Path) -> None:
    state = {name: tensor for name, tensor in llama_state().items() if "embed" not in name}
    with pytest.raises(MalformedInput, match=r"missing key `model\.embed_tokens\.weight`"):
        open_training(write(tmp_path / "x.safetensors", state))


def test_the_weights_of_a_hugging_face_folder_name_the_folder(tmp_path: Path) -> None:
    with pytest.raises(InputRefused, match="belongs to the Hugging Face folder") as caught:
        open_training(write(tmp_path / "x" / "model.safetensors"))
    assert str(tmp_path / "x") in caught.value.hint


def test_an_adapter_is_not_taken_for_a_model(tmp_path: Path) -> None:
    state = {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.ones(2, 8)}
    write(tmp_path / "x" / "adapter_model.safetensors", state, None)
    assert detect(tmp_path / "x") is None and detect(tmp_path / "x" / "adapter_model.safetensors") is None


# The only checkpoint of a folder, and what is never one


def test_the_only_checkpoint_of_a_folder_is_taken(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    torch.save(llama_state(), tmp_path / "x" / "last.ckpt")
    torch.save({"state": {}, "param_groups": []}, tmp_path / "x" / "optimizer.bin")
    torch.save({"lr": 1.0}, tmp_path / "x" / "training_args.bin")
    (tmp_path / "x" / "config.json").write_text(json.dumps(LLAMA))
    assert set(open_training(tmp_path / "x")) == set(llama_state())
    assert inspect(tmp_path / "x").format == "torch"


@pytest.mark.parametrize("name", ["optimizer.bin", "training_args.bin", "scheduler.pt", "random_states_0.pkl"])
def test_a_file_of_the_trainer_names_the_weights_next_to_it(tmp_path: Path, name: str) -> None:
    write(tmp_path / "model.safetensors", config=None)
    torch.save({"state": {0: {"step": torch.ones(1)}}, "param_groups": []}, tmp_path / name)
    with pytest.raises(InputRefused, match="not the model's weights") as caught:
        open_training(tmp_path / name)
    assert "model.safetensors" in caught.value.hint


def test_a_folder_of_the_trainers_files_alone_does_not_suggest_them(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    torch.save({"state": {}, "param_groups": []}, tmp_path / "optimizer.bin")
    with pytest.raises(InputRefused, match="contains no safetensors weights") as caught:
        open_training(tmp_path)
    assert "optimizer" not in caught.value.hint


# A Hugging Face folder, written anew


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    write(path / "model.safetensors", config=LLAMA | {"architectures": ["LlamaForCausalLM"]})
    (path / "tokenizer.json").write_text("{}")
    return path


def test_without_a_change_a_hugging_face_folder_is_refused_with_the_way(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(UnsupportedInput, match="already is a Hugging Face model folder") as caught:
        to_hf(folder, tmp_path / "hf")
    assert "--dtype" in caught.value.hint


@pytest.mark.parametrize("field", ["quantization", "quantization_config"])
def test_a_folder_that_mlx_quantized_is_told_how_to_become_plain(field: str, tmp_path: Path, folder: Path) -> None:
    config = LLAMA | {"architectures": ["LlamaForCausalLM"], field: {"group_size": 64, "bits": 4, "model.a": False}}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedInput) as refused:
        to_hf(folder, tmp_path / "hf")
    assert "--quant dequantize" in str(refused.value.hint)


def test_a_hugging_face_folder_is_cast(tmp_path: Path, folder: Path) -> None:
    to_hf(folder, tmp_path / "hf", dtype="bfloat16")
    written = open_checkpoint(tmp_path / "hf")
    assert {tensor.dtype.name for tensor in written.values()} == {"bfloat16"}
    assert written.config["torch_dtype"] == "bfloat16" and "tokenizer.json" in written.side_files
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert all(torch.equal(model.state_dict()[name], tensor.bfloat16()) for name, tensor in llama_state().items())


def test_a_hugging_face_folder_is_sharded_anew_and_joined_again(tmp_path: Path, folder: Path) -> None:
    plan = to_hf(folder, tmp_path / "shards", max_shard_size="1KB")
    assert len(plan.shards) > 1
    to_hf(tmp_path / "shards", tmp_path / "one", max_shard_size="5GB")
    assert set(open_checkpoint(tmp_path / "one")) == set(llama_state())
    assert json.loads((tmp_path / "one" / "config.json").read_text()) == json.loads(
        (folder / "config.json").read_text()
    )


def test_a_folder_that_is_said_to_be_quantized_is_not_cast(tmp_path: Path, folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": {"quant_method": "gptq"}}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(MalformedInput, match="no weight in its files is quantized"):
        to_hf(folder, tmp_path / "hf", dtype="float16")


def test_a_folder_of_torch_files_is_cast_as_before(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    torch.save(llama_state(), tmp_path / "x" / "pytorch_model.bin")
    (tmp_path / "x" / "config.json").write_text(json.dumps(LLAMA))
    to_hf(tmp_path / "x", tmp_path / "hf", dtype="float16")
    assert {tensor.dtype.name for tensor in open_checkpoint(tmp_path / "hf").values()} == {"float16"}


def test_code_of_the_folder_is_not_taken_along(tmp_path: Path, folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text()) | {"auto_map": {"AutoConfig": "x.Y"}}
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copy(__file__, folder / "x.py")
    plan = to_hf(folder, tmp_path / "hf", dtype="float16")
    assert "auto_map" not in plan.checkpoint.config and not (tmp_path / "hf" / "x.py").exists()
    assert any("auto_map" in warning for warning in plan.checkpoint.warnings)


def test_a_configuration_that_is_not_of_these_weights_is_refused(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(MalformedInput, match="the weights are not those of the configuration"):
        to_hf(tiny("llama"), tmp_path / "out", dtype="float16", config=[tiny("gpt2") / "config.json"])
    assert not (tmp_path / "out").exists()


def test_layers_of_mlx_lm_with_an_adapter_in_them_are_refused_with_what_helps(tmp_path: Path) -> None:
    state: dict[str, torch.Tensor] = {}
    for name, tensor in llama_state().items():
        stem = name.removesuffix(".weight")
        state |= {f"{stem}.linear.weight": tensor} if "q_proj" in name else {name: tensor}
        state |= {f"{stem}.lora_{part}": tensor.clone() for part in "ab" if "q_proj" in name}
    write(tmp_path / "x/model.safetensors", state)
    for command in (open_training, open_model):
        with pytest.raises(MalformedInput, match="of mlx-lm's LoRA layers") as caught:
            command(tmp_path / "x")
        assert "llmconv merge-lora BASE ADAPTER" in caught.value.hint


RANKS = ("shard-00001-model-00001-of-00001.safetensors", "shard-00002-model-00001-of-00001.safetensors")


@pytest.fixture
def of_ranks(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """What two ranks wrote with torch's `HuggingFaceStorageWriter`, and the model; one file is torch's own."""
    model = built("llama")
    state = {name: value.detach() for name, value in model.state_dict().items()}
    folder = tmp_path / "step_10/policy/weights/model"
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save_state(state, storage_writer=writer, no_dist=True)
    assert [file.name for file in folder.iterdir()] == [RANKS[0]]
    with safe_open(folder / RANKS[0], "pt") as file:
        metadata = file.metadata()
    assert json.loads(metadata["DCP_SHARDING_INFO"])["lm_head.weight"] == {"saved_offsets": [0, 0]}
    parts: list[dict[str, torch.Tensor]] = [{}, {}]
    starts: list[dict[str, Any]] = [{}, {}]
    for number, (name, value) in enumerate(sorted(state.items())):
        dim = number % value.dim()  # as FSDP splits rows, and tensor parallelism columns
        for rank, part in enumerate(value.tensor_split(2, dim)):
            parts[rank][name] = part.contiguous()
            at = [0] * value.dim()
            at[dim] = rank * (value.shape[dim] - part.shape[dim])
            starts[rank][name] = {"saved_offsets": at}
    for rank, name in enumerate(RANKS):
        save_file(parts[rank], folder / name, metadata | {"DCP_SHARDING_INFO": json.dumps(starts[rank])})
    (folder / ".hf_metadata").mkdir()
    model.config.save_pretrained(folder / ".hf_metadata")
    return folder, state


def test_files_of_ranks_are_joined(of_ranks: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    folder, state = of_ranks
    to_hf(folder, tmp_path / "hf")
    found = LlamaForCausalLM.from_pretrained(tmp_path / "hf").state_dict()
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], value) for name, value in state.items())
    assert inspect(folder).shards == 2


def test_the_step_around_files_of_ranks_names_their_folder(of_ranks: tuple[Path, Any]) -> None:
    folder, _ = of_ranks
    step = folder.parents[2]
    (step / "policy/tokenizer").mkdir()
    optimizer = step / "policy/optimizer/optim"
    save(optimizer, {"exp_avg": torch.ones(2)})
    with pytest.raises(InputRefused, match="`policy/weights/model` in it") as caught:
        open_training(step)
    assert f"give that folder: `{folder}`" in caught.value.hint
    assert f"`--tokenizer {step / 'policy/tokenizer'}`" in caught.value.hint


def test_files_of_ranks_that_do_not_fit_are_refused(of_ranks: tuple[Path, Any], tmp_path: Path) -> None:
    folder, _ = of_ranks
    (shutil.copytree(folder, tmp_path / "x") / RANKS[0]).unlink()
    with pytest.raises(MalformedInput, match="parts of `.*` that overlap or leave a gap"):
        open_training(tmp_path / "x")
    (shutil.copytree(folder, tmp_path / "y") / RANKS[1]).unlink()  # ends too early
    with pytest.raises(MalformedInput, match="of another shape than its configuration"):
        open_training(tmp_path / "y")
    save_file(load_file(folder / RANKS[1]), folder / RANKS[1], {"format": "pt"})
    with pytest.raises(MalformedInput, match="does not say in `DCP_SHARDING_INFO` which part"):
        open_training(folder)


@pytest.mark.parametrize("prefix", ["model.", "_orig_mod."])
def test_weights_under_two_names_are_called_so(prefix: str, tmp_path: Path) -> None:
    """With and without the model's own prefix, or that of a trainer's wrapper, and with other values."""
    built("llama").save_pretrained(tmp_path / "twice")
    weights = load_file(tmp_path / "twice/model.safetensors")
    of_other = {
        name.removeprefix("model.") if prefix == "model." else prefix + name: one + 1 for name, one in weights.items()
    }
    torch.save({**of_other, **weights}, tmp_path / "twice.pt")
    with pytest.raises(InputRefused, match="twice") as caught:
        to_hf(tmp_path / "twice.pt", tmp_path / "x", config=[tmp_path / "twice/config.json"])
    assert "two versions of one" in caught.value.hint
    if prefix == "model.":
        save_file({**of_other, **weights}, tmp_path / "twice/model.safetensors", {"format": "pt"})
        with pytest.raises(InputRefused, match="twice, under two names"):
            export(tmp_path / "twice", dry_run=True)


def test_fewer_rows_than_the_vocabulary_are_refused_with_their_number(tmp_path: Path) -> None:
    model = built("llama")
    model.save_pretrained(tmp_path / "cut")
    weights = load_file(tmp_path / "cut/model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = weights[name][:60].clone()
    save_file(weights, tmp_path / "cut/model.safetensors", {"format": "pt"})
    for run in (lambda: to_hf(tmp_path / "cut", tmp_path / "x", dtype="bfloat16"), lambda: export(tmp_path / "cut")):
        with pytest.raises(MalformedInput, match="shape mismatch for") as caught:
            run()
        assert "4 rows fewer than `vocab_size`" in caught.value.hint and '`{"vocab_size": 60}`' in caught.value.hint


def test_rows_beyond_the_vocabulary_are_refused_with_the_way_to_keep_them(tmp_path: Path) -> None:
    """Megatron pads the vocabulary; some bridges write its rows and the original `vocab_size`."""
    model = built("llama")
    model.save_pretrained(tmp_path / "padded")
    weights = load_file(tmp_path / "padded/model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = torch.cat([weights[name], torch.zeros(64, 16)])
    save_file(weights, tmp_path / "padded/model.safetensors", {"format": "pt"})
    for run in (
        lambda: to_hf(tmp_path / "padded", tmp_path / "x", dtype="bfloat16"),
        lambda: export(tmp_path / "padded"),
    ):
        with pytest.raises(MalformedInput, match="shape mismatch for") as caught:
            run()
        assert "64 rows more than `vocab_size`" in caught.value.hint
        assert '`{"vocab_size": 128}`' in caught.value.hint
    (tmp_path / "more.json").write_text('{"vocab_size": 128}')
    to_hf(tmp_path / "padded", tmp_path / "kept", config=[tmp_path / "more.json"])
    kept = LlamaForCausalLM.from_pretrained(tmp_path / "kept").state_dict()
    assert all(torch.equal(kept[name], value) for name, value in weights.items())
