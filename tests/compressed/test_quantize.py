"""`llmconv quantize`: which weights become codes, what it refuses, and what other commands do with its folders."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import llmconv
from llmconv.checkpoint import Checkpoint, open_checkpoint
from llmconv.cli import main
from llmconv.cli.quantize import SCHEMES as NAMES
from llmconv.compressed import quantize
from llmconv.compressed.folder import _notes, plan_quantized
from llmconv.compressed.schemes import SCHEMES, scheme_of
from llmconv.compressed.selection import select
from llmconv.convert import merge_lora, to_hf
from llmconv.errors import InputRefused, UnsupportedInput, UsageProblem
from llmconv.export import export
from llmconv.output.work import Workers
from llmconv.quantized_weights.quantized_checkpoint import quantized_checkpoint
from llmconv.tensors import BY_NAME, LazyTensor, in_memory
from llmconv.verify import verify
from tests.builders.lora_models import train
from tests.compressed.conftest import SIZES, save

NVFP4 = scheme_of("nvfp4a16")
LAYER = "model.layers.0"


def shaped(*shape: int, dtype: str = "bfloat16") -> LazyTensor:
    return in_memory(np.zeros(shape, BY_NAME[dtype].numpy), BY_NAME[dtype])


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_names_of_the_command_are_those_of_the_table() -> None:
    assert list(SCHEMES) == NAMES
    assert llmconv.quantize is quantize


def test_a_model_that_automodel_saved_has_the_codes_of_the_whole_one(tmp_path: Path) -> None:
    whole = save(tmp_path / "whole", LlamaConfig(**SIZES, tie_word_embeddings=False))
    AutoModel.from_pretrained(whole).save_pretrained(tmp_path / "base")  # no `model.` before the names, no head
    for name in ("whole", "base"):
        quantize(tmp_path / name, tmp_path / f"{name}-codes", scheme="w4a16", quant_block=32)
    codes, own = weights_of(tmp_path / "whole-codes"), weights_of(tmp_path / "base-codes")
    assert {f"model.{name}" for name in own} == {name for name in codes if not name.startswith("lm_head")}
    assert any(name.startswith("layers.") and name.endswith("weight_packed") for name in own)
    assert all(torch.equal(one, codes[f"model.{name}"]) for name, one in own.items())
    with pytest.raises(UnsupportedInput, match="no output head"):
        quantize(tmp_path / "base", tmp_path / "out", scheme="w4a16", quant_block=32, calibrate="default")


KINDS: list[tuple[str, dict[str, tuple[int, ...]], list[str], list[str]]] = [
    (
        "deepseek_v3",
        {
            f"{LAYER}.self_attn.q_a_proj.weight": (64, 64),
            f"{LAYER}.self_attn.kv_a_proj_with_mqa.weight": (48, 64),
            f"{LAYER}.self_attn.indexer.wq_b.weight": (64, 64),
            f"{LAYER}.mlp.gate.weight": (4, 64),
            f"{LAYER}.mlp.experts.0.up_proj.weight": (32, 64),
            "model.layers.1.eh_proj.weight": (64, 128),
            "model.layers.1.self_attn.o_proj.weight": (64, 64),
            "model.embed_tokens.weight": (96, 64),
        },
        ["self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa", "mlp.experts.0.up_proj"],
        ["indexer.wq_b", "mlp.gate", "1.eh_proj", "1.self_attn.o_proj", "lm_head"],
    ),
    (
        "qwen3_next",
        {
            f"{LAYER}.linear_attn.in_proj_qkvz.weight": (64, 64),
            f"{LAYER}.linear_attn.conv1d.weight": (64, 1, 4),
            f"{LAYER}.mlp.shared_expert_gate.weight": (1, 64),
            f"{LAYER}.mlp.shared_expert.gate_proj.weight": (64, 64),
            f"{LAYER}.input_layernorm.weight": (64,),
            "mtp.layers.0.mlp.up_proj.weight": (64, 64),
            "lm_head.weight": (96, 64),
        },
        ["mlp.shared_expert.gate_proj"],
        ["linear_attn.in_proj_qkvz", "mlp.shared_expert_gate", "mtp.layers.0.mlp.up_proj", "lm_head"],
    ),
    (
        "nemotron_h",
        {
            "backbone.layers.0.mixer.in_proj.weight": (64, 64),
            "backbone.layers.0.mixer.out_proj.weight": (64, 64),
            "backbone.layers.1.mixer.up_proj.weight": (64, 64),
            "lm_head.weight": (96, 64),
        },
        ["1.mixer.up_proj"],
        ["mixer.in_proj", "mixer.out_proj", "lm_head"],
    ),
    (
        "gemma3",
        {
            "model.language_model.layers.0.mlp.up_proj.weight": (64, 64),
            "model.vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight": (64, 64),
            "model.vision_tower.vision_model.patch_embedding.linear.weight": (64, 64),
            "model.multi_modal_projector.linear.weight": (64, 64),
        },
        ["mlp.up_proj"],
        ["mlp.fc1", "patch_embedding.linear", "multi_modal_projector.linear", "lm_head"],
    ),
]


@pytest.mark.parametrize(("kind", "shapes", "coded", "kept"), KINDS, ids=[row[0] for row in KINDS])
def test_what_recipes_keep_is_kept(kind: str, shapes: Any, coded: list[str], kept: list[str]) -> None:
    config = {"model_type": kind, "num_hidden_layers": 1}
    found = select({name: shaped(*shape) for name, shape in shapes.items()}, config, NVFP4)
    assert len(found.weights) == len(coded) and len(found.ignore) == len(kept)
    assert all(name.endswith(f"{end}.weight") for name, end in zip(found.weights, coded, strict=True))
    assert all(name.endswith(end) for name, end in zip(found.ignore, kept, strict=True))


def test_what_an_engine_joins_has_one_fate() -> None:
    attention = {f"{LAYER}.self_attn.{one}_proj.weight": (64, 64) for one in "qkv"}
    experts = {f"{LAYER}.mlp.experts.{at}.down_proj.weight": (64, 64 - 8 * at) for at in range(2)}
    shapes = {**attention, f"{LAYER}.self_attn.o_proj.weight": (64, 64), **experts}
    tensors = {name: shaped(*shape) for name, shape in shapes.items()}
    found = select(tensors, {"model_type": "llama"}, NVFP4, ["k_proj"])
    assert list(found.weights) == [f"{LAYER}.self_attn.o_proj.weight"]
    assert found.unfit == (f"{LAYER}.mlp.experts.1.down_proj.weight",)
    assert len(found.ignore) == 6


@pytest.mark.parametrize(("kind", "inputs_first"), [("llama4_text", True), ("qwen3_5_moe_text", False)])
def test_stacked_experts_become_one_tensor_each(kind: str, inputs_first: bool) -> None:
    gate, up, down = np.random.default_rng(2).normal(size=(3, 4, 32, 16)).astype(np.float32)
    stack = np.concatenate([gate, up], axis=1)
    turned = [one.swapaxes(1, 2) if inputs_first else one for one in (stack, down)]
    names = (f"{LAYER}.mlp.experts.gate_up_proj", f"{LAYER}.mlp.experts.down_proj")
    tensors = {name: in_memory(one, BY_NAME["float32"]) for name, one in zip(names, turned, strict=True)}
    found = select(tensors, {"model_type": kind}, NVFP4)
    for at in range(4):
        for name, wanted in (("gate_proj", gate), ("up_proj", up), ("down_proj", down)):
            read = found.weights[f"{LAYER}.mlp.experts.{at}.{name}.weight"].tensor
            assert np.array_equal(read.read(), wanted[at]) and np.array_equal(read.rows(3, 9), wanted[at][3:9])
    with pytest.raises(UnsupportedInput, match="not known for `dbrx`"):
        select(tensors, {"model_type": "dbrx"}, NVFP4)


@pytest.mark.parametrize("inputs_first", [True, False])
def test_stacks_that_are_saved_in_both_ways_are_told_apart_by_their_shapes(inputs_first: bool) -> None:
    rng = np.random.default_rng(3)
    stack, down = rng.normal(size=(2, 64, 16)).astype(np.float32), rng.normal(size=(2, 16, 32)).astype(np.float32)
    turned = [one.swapaxes(1, 2) if inputs_first else one for one in (stack, down)]
    names = (
        "model.language_model.layers.0.mlp.experts.gate_up_proj",
        "model.language_model.layers.0.mlp.experts.down_proj",
    )
    tensors = {name: in_memory(one, BY_NAME["float32"]) for name, one in zip(names, turned, strict=True)}
    found = select(tensors, {"model_type": "qwen3_vl_moe", "text_config": {"hidden_size": 16}}, NVFP4).weights
    stem = "model.language_model.layers.0.mlp.experts.1"
    assert np.array_equal(found[f"{stem}.up_proj.weight"].tensor.read(), stack[1, 32:])
    assert np.array_equal(found[f"{stem}.down_proj.weight"].tensor.read(), down[1])
    square = {names[0]: shaped(2, 64, 64)}
    with pytest.raises(UnsupportedInput, match="does not tell inputs from outputs"):
        select(square, {"model_type": "qwen3_vl_moe", "text_config": {"hidden_size": 64}}, NVFP4)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("mlp.experts.fc1.weight", (4, 16, 64)),
        ("block_sparse_moe.input_linear.weight", (4, 64, 16)),
        ("ffn.experts.mlp.w1", (64, 16)),
    ],
)
def test_experts_that_no_engine_reads_as_codes_are_refused(name: str, shape: tuple[int, ...]) -> None:
    tensors = {f"{LAYER}.{name}": shaped(*shape), f"{LAYER}.self_attn.q_proj.weight": shaped(64, 64)}
    with pytest.raises(UnsupportedInput, match=f"the experts of `{LAYER}.{name}` are stacked in one tensor"):
        select(tensors, {"model_type": "any"}, NVFP4)


def test_matrices_of_conv1d_are_refused_by_name() -> None:
    tensors = {"transformer.h.0.attn.c_attn.weight": shaped(64, 192), "transformer.wte.weight": shaped(96, 64)}
    with pytest.raises(UnsupportedInput, match="`transformer.h.0.attn.c_attn.weight` is stored transposed"):
        select(tensors, {"model_type": "gpt2"}, NVFP4)


@pytest.mark.parametrize(("scheme", "count"), [("nvfp4a16", 2), ("mxfp4", 0)])
def test_a_warning_names_matrices_whose_global_scales_vllm_leaves_unset(
    scheme: str, count: int, llama: Path, tmp_path: Path
) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if "q_proj.weight" in name]:
            parts = [tensors.pop(name.replace("q_proj", f"{one}_proj")) for one in "qkv"]
            tensors[name.replace("q_proj", "qkv_proj")] = torch.cat(parts)

    stored = open_checkpoint(changed(llama, tmp_path / "model", edit))
    warned = _notes(plan_quantized(stored, scheme_of(scheme))[0], scheme_of(scheme))
    assert sum(one.count("qkv_proj") for one in warned) == count


def test_joined_matrices_share_a_global_scale(llama: Path, tmp_path: Path) -> None:
    quantize(llama, tmp_path / "out", scheme="nvfp4a16")
    found = {name: one for name, one in weights_of(tmp_path / "out").items() if name.endswith("global_scale")}
    whole = {
        name.removesuffix(".weight_global_scale").rpartition(".")[2]: one
        for name, one in found.items()
        if ".0." in name
    }
    assert whole["q_proj"] == whole["k_proj"] == whole["v_proj"] and whole["gate_proj"] == whole["up_proj"]
    assert len({float(one) for one in whole.values()}) == 4


BAD: list[tuple[dict[str, Any], str]] = [
    ({"scheme": "fp9"}, "unknown scheme `fp9`"),
    ({"scheme": "fp8-block", "quant_block": 64}, "`--quant-block` does not apply"),
    ({"scheme": "w4a16", "quant_block": 100}, "no kernel has groups of 100"),
    ({"scheme": "w4a16", "method": "best"}, "`--method` is 'best'"),
    ({"scheme": "w4a16", "method": "gptq"}, "`--method gptq` needs a text"),
    ({"scheme": "w4a16", "method": "rtn", "calibrate": "default"}, "`--calibrate` guides the search"),
    ({"scheme": "w8a8", "calibrate": "default"}, "`--calibrate` does not apply"),
    ({"scheme": "w4a16", "base_format": "exl2"}, "`--base-format` is 'exl2'"),
    ({"scheme": "w4a16-asym", "base_format": "gptq"}, "`--base-format gptq` has no zero points"),
    ({"scheme": "w4a16", "calibrate": "default", "work": Workers(2)}, "`--calibrate` measures activations in one"),
    ({"scheme": "w8a8", "quant_exclude": ["nothing"]}, "matches no weight"),
    ({"scheme": "w8a8", "quant_exclude": ["("]}, "not a valid regular expression"),
]


@pytest.mark.parametrize(("options", "words"), BAD)
def test_wrong_options_are_refused(options: dict[str, Any], words: str, llama: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageProblem, match=words.replace("(", r"\(")):
        quantize(llama, tmp_path / "out", **options)
    assert not any(tmp_path.iterdir())


def changed(model: Path, folder: Path, edit: Any) -> Path:
    shutil.copytree(model, folder)
    tensors = weights_of(folder)
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("scheme", ["fp8-dynamic", "w4a16", "nvfp4a16", "mxfp4"])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_weights_that_are_not_finite_are_refused(scheme: str, value: float, llama: Path, tmp_path: Path) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{LAYER}.mlp.down_proj.weight"][7, 9] = value

    model = changed(llama, tmp_path / "model", edit)
    with pytest.raises(InputRefused, match="`model.layers.0.mlp.down_proj.weight` contains infinite or NaN"):
        quantize(model, tmp_path / "out", scheme=scheme)
    assert not (tmp_path / "out").exists()
    made = quantize(model, tmp_path / "out", scheme=scheme, quant_exclude="0.mlp.down_proj")
    assert f"{LAYER}.mlp.down_proj" in made.ignore


def test_a_quantized_model_is_refused(llama: Path, tmp_path: Path) -> None:
    quantize(llama, tmp_path / "out", scheme="w8a8")
    with pytest.raises(UnsupportedInput, match="`out` is quantized"):
        quantize(tmp_path / "out", tmp_path / "again", scheme="w8a8")


def test_what_does_not_divide_is_kept_and_said(llama: Path, tmp_path: Path) -> None:
    made = quantize(llama, tmp_path / "out", scheme="w4a16", quant_block=256, dry_run=True)
    assert {*made.ignore} == {f"{LAYER}.mlp.down_proj", "model.layers.1.mlp.down_proj", "lm_head"}
    assert "2 matrices are kept, whose shapes are not multiples of 1×256" in made.warnings[0]


def test_scales_that_float16_cannot_hold_are_refused(llama: Path, tmp_path: Path) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            tensors[name] = (tensor * 1e-4).half() if "up_proj" in name else tensor.half()

    model = changed(llama, tmp_path / "model", edit)
    with pytest.raises(InputRefused, match="too small for float16"):
        quantize(model, tmp_path / "out", scheme="fp8-dynamic")
    quantize(model, tmp_path / "out", scheme="fp8-dynamic", dtype="bfloat16")


def test_adapters_are_merged_first(tmp_path: Path) -> None:
    torch.manual_seed(1)
    config = LlamaConfig(**SIZES)
    case = train(LlamaForCausalLM(config), tmp_path / "case", merge=False, target_modules=["q_proj", "down_proj"])
    made = quantize(case.base, tmp_path / "out", scheme="fp8-dynamic", adapters=[case.adapter])
    merge_lora(case.base, case.adapter, tmp_path / "merged")
    quantize(tmp_path / "merged", tmp_path / "wanted", scheme="fp8-dynamic")
    found, wanted = weights_of(tmp_path / "out"), weights_of(tmp_path / "wanted")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(one.view(torch.uint8), wanted[name].view(torch.uint8)) for name, one in found.items())
    record = json.loads((tmp_path / "out/llmconv.json").read_text())["steps"][-1]
    assert record["command"] == "quantize" and record["options"]["adapters"][0]["name"] == "adapter"
    assert verify(tmp_path / "out", reference=case.base, adapter=case.adapter).exit_code == 0
    assert verify(tmp_path / "out", reference=case.base).exit_code == 1
    assert len(made.weights) == 14


def test_a_training_checkpoint_is_converted_on_the_way(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    torch.save(weights_of(llama), tmp_path / "run/model.pt")
    shutil.copy(llama / "config.json", tmp_path / "run")
    to_hf(tmp_path / "run", tmp_path / "plain")
    quantize(tmp_path / "plain", tmp_path / "wanted", scheme="mxfp4")
    quantize(tmp_path / "run", tmp_path / "out", scheme="mxfp4")
    assert (tmp_path / "out/model.safetensors").read_bytes() == (tmp_path / "wanted/model.safetensors").read_bytes()
    assert verify(tmp_path / "out", reference=tmp_path / "run").exit_code == 0


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["fp8-block", "nvfp4a16", "w4a16-asym"])
def test_workers_write_the_same_tensors(scheme: str, llama: Path, tmp_path: Path) -> None:
    quantize(llama, tmp_path / "one", scheme=scheme)
    quantize(llama, tmp_path / "many", scheme=scheme, max_shard_size="300KB", work=Workers(2))
    one, many = (open_checkpoint(tmp_path / name) for name in ("one", "many"))
    assert many.shards > 2 and one.keys() == many.keys()
    assert all(many[name].read().tobytes() == tensor.read().tobytes() for name, tensor in one.items())
    assert quantize(llama, tmp_path / "one", scheme=scheme, resume=True).plan.found


def test_the_command_prints_what_becomes_of_each_tensor(llama: Path, tmp_path: Path) -> None:
    words = ["quantize", str(llama), "-o", str(tmp_path / "out"), "--scheme", "fp8-dynamic"]
    dry = CliRunner().invoke(main, [*words, "--dry-run"])
    assert "lm_head.weight  bfloat16  [96, 256]  kept" in dry.stdout
    assert f"{LAYER}.mlp.up_proj.weight_scale  bfloat16  [384, 1]  quantized" in dry.stdout
    assert not any(tmp_path.iterdir())
    done = json.loads(CliRunner().invoke(main, [*words, "--json"]).stdout)
    assert done["written"] and len(done["quantized"]) == 14 and done["ignore"] == ["lm_head"]
    checked = CliRunner().invoke(main, ["verify", str(tmp_path / "out"), "--reference", str(llama)])
    assert checked.exit_code == 0 and "every code the nearest" in checked.stdout
    shown = CliRunner().invoke(main, ["inspect", str(tmp_path / "out")])
    assert shown.exit_code == 0 and "compressed-tensors" in shown.stdout


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["w4a16", "fp8-block", "nvfp4a16", "mxfp4"])
def test_a_folder_of_codes_is_exported_and_its_graphs_verified(scheme: str, llama: Path, tmp_path: Path) -> None:
    quantize(llama, tmp_path / "out", scheme=scheme)
    export(tmp_path / "out", tmp_path / "graphs")
    report = verify(tmp_path / "graphs", reference=tmp_path / "out")
    assert report.exit_code == 0, report.lines()


def values(checkpoint: Checkpoint, name: str) -> Any:
    found = quantized_checkpoint(checkpoint)
    assert found
    return found.plain[name].read()


@pytest.mark.parametrize("scheme", ["nvfp4a16", "mxfp4"])
def test_a_merge_is_stored_as_the_base_is(scheme: str, llama: Path, tmp_path: Path) -> None:
    quantize(llama, tmp_path / "coded", scheme=scheme)
    plain = AutoModelForCausalLM.from_pretrained(llama)
    case = train(plain, tmp_path, merge=False, target_modules=["q_proj"], lora_alpha=0.1)
    merge_lora(tmp_path / "coded", case.adapter, tmp_path / "codes", base_quant="requantize")
    merge_lora(tmp_path / "coded", case.adapter, tmp_path / "plain", base_quant="dequantize", dtype="float32")
    name = f"{LAYER}.self_attn.q_proj.weight"
    found, wanted = values(open_checkpoint(tmp_path / "codes"), name), open_checkpoint(tmp_path / "plain")[name].read()
    assert np.linalg.norm(found - wanted) < 0.2 * np.linalg.norm(wanted)


def test_a_head_that_the_configuration_ties_and_that_is_another_one_is_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save(tmp_path / "model", LlamaConfig(**{**SIZES, "tie_word_embeddings": False}))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    quantize(model, tmp_path / "out", scheme="w8a8")
    assert json.loads((tmp_path / "out/config.json").read_text())["tie_word_embeddings"] is False
    assert "but they differ" in capsys.readouterr().err
