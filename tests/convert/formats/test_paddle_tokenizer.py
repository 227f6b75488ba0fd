"""PaddleNLP's tokenizer files: the same ids as sentencepiece and tiktoken, and what transformers loads stays."""

from __future__ import annotations

import json
import shutil
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tiktoken
from transformers import AutoTokenizer

from llmconv.convert import to_hf
from llmconv.convert.formats.paddle.format import GLM_SPECIAL, QWEN_PATTERN, QWEN_SPECIAL, read_paddle_tokenizer
from llmconv.convert.opening import open_training
from llmconv.convert.tokenizers import parse_tiktoken
from llmconv.errors import MalformedInput

FIXTURES = Path(__file__).parents[2] / "fixtures"
SENTENCEPIECE = FIXTURES / "meta" / "llama2_gqa_mp2_bf16" / "tokenizer.model"
TIKTOKEN = FIXTURES / "meta" / "llama3_gqa_mp1_bf16" / "tokenizer.model"
TEXTS = ["hello world", "  two  spaces\n", "a1234 b", "é日😀 e\u0301"]


def with_tokenizer(tmp_path: Path, case: str, file: Path, name: str, **settings: Any) -> Any:
    """The tokenizer that transformers loads from the converted folder."""
    folder = shutil.copytree(FIXTURES / "paddle" / case, tmp_path / "paddle")
    shutil.copy(file, folder / name)
    if settings:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    to_hf(folder, tmp_path / "hf")
    return AutoTokenizer.from_pretrained(tmp_path / "hf")


@pytest.mark.parametrize("text", TEXTS)
def test_a_llamas_ids_are_those_of_sentencepiece(tmp_path: Path, text: str) -> None:
    loaded = with_tokenizer(
        tmp_path, "llama_gqa_fp32", SENTENCEPIECE, "sentencepiece.bpe.model", tokenizer_class="LlamaTokenizer"
    )
    original = sentencepiece.SentencePieceProcessor(model_file=str(SENTENCEPIECE))
    assert loaded(text)["input_ids"] == [original.bos_id(), *original.encode(text)]
    assert (loaded.eos_token_id, (tmp_path / "hf" / "tokenizer.model").is_file()) == (original.eos_id(), True)


def test_a_llama_that_adds_no_bos_adds_none(tmp_path: Path) -> None:
    loaded = with_tokenizer(tmp_path, "llama_gqa_fp32", SENTENCEPIECE, "sentencepiece.bpe.model", add_bos_token=False)
    original = sentencepiece.SentencePieceProcessor(model_file=str(SENTENCEPIECE))
    assert loaded("hello")["input_ids"] == original.encode("hello")


def test_a_chatglm_begins_with_its_two_marks(tmp_path: Path) -> None:
    loaded = with_tokenizer(tmp_path, "chatglm_v2", SENTENCEPIECE, "tokenizer.model")
    original = sentencepiece.SentencePieceProcessor(model_file=str(SENTENCEPIECE))
    size = original.vocab_size()
    assert loaded("hello")["input_ids"] == [size + 1, size + 3, *original.encode("hello")]
    assert loaded.convert_tokens_to_ids(list(GLM_SPECIAL)) == list(range(size, size + 9))


@pytest.mark.parametrize("text", [*TEXTS, "<|im_start|>hello<|im_end|>"])
def test_a_qwens_ids_are_those_of_tiktoken(tmp_path: Path, text: str) -> None:
    loaded = with_tokenizer(tmp_path, "qwen", TIKTOKEN, "qwen.tiktoken", tokenizer_class="QWenTokenizer")
    ranks = parse_tiktoken(TIKTOKEN.read_bytes())
    specials = {name: number for number, name in enumerate(QWEN_SPECIAL, len(ranks))}
    original = tiktoken.Encoding("x", pat_str=QWEN_PATTERN, mergeable_ranks=ranks, special_tokens=specials)
    expected = original.encode(unicodedata.normalize("NFC", text), allowed_special="all")
    assert loaded(text)["input_ids"] == expected


def test_added_tokens_keep_their_ids(tmp_path: Path) -> None:
    folder = shutil.copytree(FIXTURES / "paddle" / "llama_gqa_fp32", tmp_path / "paddle")
    shutil.copy(SENTENCEPIECE, folder / "sentencepiece.bpe.model")
    size = sentencepiece.SentencePieceProcessor(model_file=str(SENTENCEPIECE)).vocab_size()
    (folder / "added_tokens.json").write_text(json.dumps({"<pad>": size, "<more>": size + 1}))
    to_hf(folder, tmp_path / "hf")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert loaded.convert_tokens_to_ids(["<pad>", "<more>"]) == [size, size + 1]


def test_a_tokenizer_json_stays_as_it_is(tmp_path: Path) -> None:
    first = with_tokenizer(tmp_path, "llama_gqa_fp32", SENTENCEPIECE, "sentencepiece.bpe.model")
    folder = shutil.copytree(FIXTURES / "paddle" / "bloom", tmp_path / "bloom")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "BloomTokenizer", "bos_token": "<s>"}')
    shutil.copy(tmp_path / "hf" / "tokenizer.json", folder)
    to_hf(folder, tmp_path / "bloom_hf")
    assert (tmp_path / "bloom_hf" / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    assert AutoTokenizer.from_pretrained(tmp_path / "bloom_hf")("hello")["input_ids"] == first("hello")["input_ids"]


def test_vocab_and_merges_of_gpt_are_loaded(tmp_path: Path) -> None:
    folder = shutil.copytree(FIXTURES / "paddle" / "gpt3", tmp_path / "gpt")
    (folder / "vocab.json").write_text(json.dumps({"<|endoftext|>": 7, "h": 1, "i": 2, "hi": 3}))
    (folder / "merges.txt").write_text("#version: 0.2\nh i\n")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "GPTTokenizer"}')
    to_hf(folder, tmp_path / "hf")
    assert AutoTokenizer.from_pretrained(tmp_path / "hf")("hi")["input_ids"] == [3]


def test_a_missing_tokenizer_is_a_warning_and_can_be_given(tmp_path: Path) -> None:
    llama = FIXTURES / "paddle" / "llama_gqa_fp32"
    assert any("contains no tokenizer" in warning for warning in open_training(llama).warnings)
    shutil.copy(SENTENCEPIECE, tmp_path / "sentencepiece.bpe.model")
    assert "tokenizer.json" in open_training(llama, tokenizer=tmp_path).side_files


def test_paddles_own_chat_template_is_left_out_with_a_warning(tmp_path: Path) -> None:
    (tmp_path / "chat_template.json").write_text('{"conversation": ["{{user}}", "{{bot}}"]}')
    warnings: list[str] = []
    assert "chat_template.json" not in read_paddle_tokenizer(tmp_path, "llama", warnings)
    assert any("left out `chat_template.json`" in warning for warning in warnings)


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "sentencepiece.bpe.model", "qwen.tiktoken"]
)
def test_a_damaged_tokenizer_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x0a\xff[not what it says")
    with pytest.raises(MalformedInput):
        read_paddle_tokenizer(tmp_path, "llama", [])
