"""Meta's tokenizers as tokenizer.json: the same ids and the same text as sentencepiece and tiktoken themselves."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import sentencepiece
import tiktoken
from hypothesis import given, settings
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from llmconv.convert import to_hf
from llmconv.convert.formats.meta import load_tokenizer
from llmconv.convert.inspection import inspect
from llmconv.convert.tokenizers import (
    PATTERN,
    is_tiktoken,
    parse_sentencepiece,
    parse_tiktoken,
    tiktoken_json,
    tokenizer_json,
)
from llmconv.convert.tokenizers import reserved_tokens as special_tokens
from llmconv.errors import MalformedInput

META = Path(__file__).parents[2] / "fixtures" / "meta"
SENTENCEPIECE = (META / "llama2_gqa_mp2_bf16" / "tokenizer.model").read_bytes()
TIKTOKEN = (META / "llama3_gqa_mp1_bf16" / "tokenizer.model").read_bytes()

TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="<"), max_size=40) | st.text(
    st.sampled_from("abehlost  .\n\t'12é日😀▁"), max_size=60
)


def fast(content: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_str(json.dumps(content))


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(TEXTS)
def test_ids_are_those_of_sentencepiece(text: str) -> None:
    original = sentencepiece.SentencePieceProcessor(model_proto=SENTENCEPIECE)
    converted = fast(tokenizer_json(parse_sentencepiece(SENTENCEPIECE)))
    assert converted.encode(text).ids == [original.bos_id(), *original.encode(text)]


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(TEXTS)
def test_ids_are_those_of_tiktoken(text: str) -> None:
    ranks = parse_tiktoken(TIKTOKEN)
    original = tiktoken.Encoding("x", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
    converted = fast(tiktoken_json(ranks, since_3_1=False))
    ids = original.encode(text)
    assert converted.encode(text).ids == [len(ranks), *ids]
    assert converted.decode(ids) == original.decode(ids)


@pytest.mark.parametrize("case", ["llama2_gqa_mp2_bf16", "llama3_1_scaled_mp2_bf16"])
def test_transformers_loads_the_tokenizer_and_its_special_tokens(tmp_path: Path, case: str) -> None:
    to_hf(META / case, tmp_path / "hf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    text = "  Hello,  world \n"
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert tokenizer.convert_tokens_to_ids(tokenizer.eos_token) == tokenizer.bos_token_id + 1


def test_special_tokens_of_both_generations_stand_where_they_belong() -> None:
    old, new = special_tokens(since_3_1=False), special_tokens(since_3_1=True)
    assert len(old) == len(new) == len(set(old)) == len(set(new)) == 256
    assert (old[2], old[5], old[8], old[10], old[255]) == tuple(
        f"<|reserved_special_token_{number}|>" for number in (0, 3, 4, 5, 250)
    )
    assert new[4:11] == [
        "<|finetune_right_pad_id|>",
        "<|reserved_special_token_2|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eom_id|>",
        "<|eot_id|>",
        "<|python_tag|>",
    ]
    assert (new[11], new[255]) == ("<|reserved_special_token_3|>", "<|reserved_special_token_247|>")


def test_the_kind_of_a_tokenizer_is_detected_by_its_content() -> None:
    assert is_tiktoken(TIKTOKEN)
    assert not is_tiktoken(SENTENCEPIECE)
    assert not is_tiktoken(b"")


def train(vocab_size: int = 40, **options: Any) -> bytes:
    """A sentencepiece model of a few words."""
    model = io.BytesIO()
    words = ["the cat sat on the mat", "a dog and a cat", "mats and dogs sat"] * 20
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(words), model_writer=model, vocab_size=vocab_size, minloglevel=9, **options
    )
    return model.getvalue()


def test_a_model_that_normalizes_keeps_its_ids() -> None:
    data = train(model_type="bpe", character_coverage=1.0)
    original = sentencepiece.SentencePieceProcessor(model_proto=data)
    converted = fast(tokenizer_json(parse_sentencepiece(data)))
    for text in ("the  cat", " a mat ", "\uff43\uff41\uff54 sat", "dogs"):
        assert converted.encode(text).ids == [original.bos_id(), *original.encode(text)]


def test_a_unigram_model_is_copied_with_a_warning(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(train(20, model_type="unigram"))
    loaded = load_tokenizer(tmp_path, since_3_1=False)
    assert set(loaded.files) == {"tokenizer.model", "tokenizer_config.json"}
    assert "a unigram model" in loaded.warnings[0]


SYMBOLS: dict[str, dict[str, Any]] = {
    "words": {"user_defined_symbols": ["<turn>", "cat", "tsa"]},
    "one begins another": {"user_defined_symbols": ["<t>", "<t>x", "t"]},
    "with spaces": {"user_defined_symbols": ["  ", "\t", "\n"], "remove_extra_whitespaces": False},
    "not normalized": {"user_defined_symbols": ["\uff43\uff41\uff54", "A"], "normalization_rule_name": "nmt_nfkc_cf"},
    "plain": {"user_defined_symbols": ["<turn>"], "normalization_rule_name": "identity"},
    "lines are kept": {"normalization_rule_name": "nfkc"},
    "no first space": {"user_defined_symbols": ["<turn>", "dog"], "add_dummy_prefix": False},
    "a suffix": {"user_defined_symbols": ["<turn>"], "treat_whitespace_as_suffix": True},
    "a suffix alone": {"treat_whitespace_as_suffix": True},
}
"""Options of training under which a piece is found before the text is normalized, or spaces end words."""
AROUND = ("the cat sat<turn>a dog", "<turn> cat", "cat<turn>", "a  cat  ", "\uff43\uff41\uff54s A a", "<t>x <t> x", "")


@pytest.mark.parametrize("options", SYMBOLS.values(), ids=SYMBOLS)
def test_pieces_that_the_trainer_was_given_have_the_ids_of_sentencepiece(
    options: dict[str, Any], tmp_path: Path
) -> None:
    data = train(60, model_type="bpe", character_coverage=1.0, hard_vocab_limit=False, **options)
    (tmp_path / "tokenizer.model").write_bytes(data)
    loaded = load_tokenizer(tmp_path, since_3_1=False)
    if "tokenizer.json" not in loaded.files:
        assert loaded.warnings
        return
    original = sentencepiece.SentencePieceProcessor(model_proto=data)
    found = Tokenizer.from_str(loaded.files["tokenizer.json"].decode())
    for text in (*AROUND, "\tthe\tcat\n sat \n", " \u3000dogs \u2581"):
        assert found.encode(text).ids == [original.bos_id(), *original.encode(text)], text


@pytest.mark.parametrize("name", ["words", "one begins another", "plain", "lines are kept", "no first space"])
def test_such_pieces_are_converted(name: str) -> None:
    assert parse_sentencepiece(train(60, model_type="bpe", hard_vocab_limit=False, **SYMBOLS[name])).is_converted


def test_a_folder_with_a_finished_tokenizer_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(b"{}")
    assert load_tokenizer(tmp_path, since_3_1=False).files == {"tokenizer.json": b"{}"}


@pytest.mark.parametrize(
    ("parse", "data"),
    [
        (parse_sentencepiece, SENTENCEPIECE[:1000]),
        (parse_sentencepiece, b"\x0b\x00"),
        (parse_tiktoken, b"AA== 1\n"),
        (parse_tiktoken, b"AA== x\n"),
        (parse_tiktoken, b"\xff 0\n"),
    ],
)
def test_a_damaged_tokenizer_is_refused(parse: Callable[[bytes], Any], data: bytes) -> None:
    with pytest.raises(MalformedInput):
        parse(data)


def test_every_chat_template_of_a_tokenizer_reaches_the_output(chatting: Path, tmp_path: Path) -> None:
    shutil.copytree(chatting, tmp_path / "in")
    (tmp_path / "in" / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(chatting)
    tokenizer.chat_template = {"default": "{{ messages[0].content }}", "tool_use": "tools: {{ messages[0].content }}"}
    tokenizer.save_pretrained(tmp_path / "in")
    to_hf(tmp_path / "in", tmp_path / "out", dtype="bfloat16")
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == tokenizer.chat_template
    assert "additional_chat_templates/tool_use.jinja" in inspect(tmp_path / "out").side_files
