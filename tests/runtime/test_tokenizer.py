"""Tokens are decoded in the fastest way, to the same text."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest
import sentencepiece
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from llmconv.errors import InputRefused
from llmconv.generation.row import TextStream
from llmconv.runtime.tokenizer import TokenDecoder, load_tokenizer


class Shouting(PreTrainedTokenizerFast):  # type: ignore[misc]
    """Has its own way from tokens to text."""

    def _decode(self, *given: Any, **named: Any) -> str:
        return str(super()._decode(*given, **named)).upper()


TEXT = "we need to add 9 and 6\n\n  it's 12345 Café\t😊 I'LL"
WORDS = r"(?i:'s|'ll)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# Steps that a file of a released model has: GPT-2's, Llama 3's, DeepSeek's (digits apart), Llama 2's
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
STEPS: dict[str, Any] = {
    "gpt2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "llama3": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(WORDS), "isolated"), BYTES]),
    "deepseek": pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(one), "isolated") for one in (r"[\r\n]", r"\s?\p{L}+")),
            *(pre_tokenizers.Digits(individual_digits=True), BYTES),
        ]
    ),
    "llama2": None,
}
CLASSES = ("LlamaTokenizerFast", "LlamaTokenizer", "GPT2Tokenizer", "Qwen2Tokenizer", "GPTNeoXTokenizerFast", None)


def trained_file(steps: str, folder: Path) -> Tokenizer:
    """A small BPE of its own text, saved as `tokenizer.json`."""
    found = Tokenizer(models.BPE(byte_fallback=steps == "llama2"))
    special = ["<s>", "</s>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256 if steps == "llama2" else 0))]
    if steps == "llama2":
        found.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        last = decoders.Strip(" ", 1, 0)
        found.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), last])
    else:
        found.pre_tokenizer, found.decoder = STEPS[steps], decoders.ByteLevel()
    alphabet = [] if steps == "llama2" else pre_tokenizers.ByteLevel.alphabet()
    found.train_from_iterator(
        [TEXT] * 3, trainers.BpeTrainer(vocab_size=420, special_tokens=special, initial_alphabet=alphabet)
    )
    found.save(str(folder / "tokenizer.json"))
    return found


@pytest.mark.quick_rows(
    "qwen2-LlamaTokenizerFast-deepseek", "llama-GPT2Tokenizer-llama3", "llama-LlamaTokenizer-llama2"
)
@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2", "deepseek_v3"])
def test_tokens_are_those_of_the_file_whatever_its_class(kind: str, name: str, steps: str, tmp_path: Path) -> None:
    file = trained_file(steps, tmp_path)
    given = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": name, "add_bos_token": False}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({key: one for key, one in given.items() if one}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    ids, found = file.encode(TEXT, add_special_tokens=False).ids, load_tokenizer(tmp_path)
    assert found(TEXT, add_special_tokens=False)["input_ids"] == ids
    assert TokenDecoder(found)(ids) == file.decode(ids)


SPECIAL = ["<unk>", "<s>", "</s>", "<pad>", "<mask>", "[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"]
DIGITS = pre_tokenizers.Digits(individual_digits=True)


def file_of(kind: str, folder: Path) -> Tokenizer:
    """A small tokenizer of that kind, with steps that no class of transformers has, saved as `tokenizer.json`."""
    sizes: dict[str, Any] = {"vocab_size": 150, "special_tokens": SPECIAL, "show_progress": False}
    if kind == "unigram":
        found, trainer = Tokenizer(models.Unigram()), cast(Any, trainers.UnigramTrainer(unk_token="<unk>", **sizes))
        found.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(split=False), DIGITS])
        found.decoder = decoders.Metaspace()
    else:
        found, trainer = Tokenizer(models.WordPiece(unk_token="<unk>")), trainers.WordPieceTrainer(**sizes)
        found.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), DIGITS])
        found.decoder = decoders.WordPiece()
    found.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    found.train_from_iterator([TEXT] * 3, trainer)
    found.save(str(folder / "tokenizer.json"))
    return found


def require_same(file: Tokenizer, name: str, folder: Path) -> None:
    """The tokenizer of a folder, opened as the class `name`, has the tokens of its file."""
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name, "unk_token": "<unk>"}))
    found = load_tokenizer(folder).backend_tokenizer
    for text in (TEXT, " a\tb\n  c", "12,345", "\uff21\u00e9\u6771 "):
        ids = file.encode(text, add_special_tokens=False).ids
        assert found.encode(text, add_special_tokens=False).ids == ids, name
        assert found.decode(ids) == file.decode(ids) or name == "CLIPTokenizer", name


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("unigram", "LlamaTokenizer"),
        ("unigram", "XLMRobertaTokenizer"),
        ("wordpiece", "BertTokenizer"),
        ("wordpiece", "Qwen2Tokenizer"),
    ],
)
def test_a_model_of_another_kind_than_that_of_the_class_is_that_of_the_file(
    kind: str, name: str, tmp_path: Path
) -> None:
    require_same(file_of(kind, tmp_path), name, tmp_path)


def test_a_class_that_does_not_read_the_file_can_be_replaced_by_the_plain_one(tmp_path: Path) -> None:
    file = file_of("wordpiece", tmp_path)
    with pytest.raises(InputRefused, match="cannot be read") as caught:
        require_same(file, "XLMRobertaTokenizer", tmp_path)
    assert "to `PreTrainedTokenizerFast`" in caught.value.hint
    require_same(file, "PreTrainedTokenizerFast", tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InputRefused) as caught:
        load_tokenizer(tmp_path)
    assert caught.value.hint.startswith("copy the tokenizer files")


OWN_IDS = {"EsmcTokenizer", "MBart50Tokenizer", "NougatTokenizer"}
"""Of proteins, and classes that give tokens ids of their own."""


def tokenizer_classes() -> list[str]:
    """The classes that transformers builds anew from the vocabulary of a `tokenizer.json`."""
    import transformers  # noqa: PLC0415
    from transformers.convert_slow_tokenizer import SLOW_TO_FAST_CONVERTERS  # noqa: PLC0415
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES  # noqa: PLC0415

    listed = [
        one for names in TOKENIZER_MAPPING_NAMES.values() for one in (names if isinstance(names, tuple) else [names])
    ]
    known = {*listed, *SLOW_TO_FAST_CONVERTERS} - OWN_IDS
    found = {name: getattr(transformers, name, None) for name in known if name}
    plain = transformers.PreTrainedTokenizerFast
    return sorted(name for name, one in found.items() if isinstance(one, type) and issubclass(one, plain))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["unigram", "wordpiece"])
def test_every_class_of_transformers_has_the_tokens_of_the_file(kind: str, tmp_path: Path) -> None:
    """Or transformers itself refuses a vocabulary of another kind."""
    file, read = file_of(kind, tmp_path), 0
    for name in tokenizer_classes():
        with suppress(InputRefused):
            require_same(file, name, tmp_path)
            read += 1
    assert read > 40


@pytest.mark.parametrize("name", ["TokenizersBackend", "LlamaTokenizerFast"])
def test_tokens_of_bytes_are_read_as_bytes_whatever_the_decoder(name: str, tmp_path: Path) -> None:
    file = trained_file("llama3", tmp_path)
    right = file.decode(file.encode(TEXT, add_special_tokens=False).ids)
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    file.decoder = decoders.Sequence(steps)
    file.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    found = load_tokenizer(tmp_path)
    ids = found(TEXT, add_special_tokens=False)["input_ids"]
    assert right == TokenDecoder(found)(ids) and "\u0120" not in right


ADDED = (
    "\u00fcber",
    "\u00a1hola!",
    "\u010d",
    "\u0120",
    "na\u00efve",
    "\u0142",
    "\u00e9t\u00e9",
    "<x>",
    "\u010de\u0161",
    "two words",
)
"""Added tokens; letters of the first seven all stand for bytes in byte-level tokenizers."""


@pytest.mark.quick_rows("None-gpt2", "LlamaTokenizerFast-llama3")
@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("name", CLASSES)
def test_an_added_token_is_its_own_text(steps: str, name: str | None, tmp_path: Path) -> None:
    file = trained_file(steps, tmp_path)
    new = [one for one in ADDED if file.token_to_id(one) is None]  # others are bytes
    file.add_tokens([AddedToken(one, normalized=False, special=one == "<x>") for one in new])
    content = json.loads(file.to_str())
    if name is None:  # as read from a GGUF file
        content["model"]["vocab"] |= {one: file.token_to_id(one) for one in new}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name} if name else {}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    found, ids = load_tokenizer(tmp_path), [file.get_vocab()[one] for one in new]
    shown = [one for one in new if one != "<x>"]
    assert len(new) > 6 and TokenDecoder(found)(ids) == "".join(shown)
    assert found.decode(ids, clean_up_tokenization_spaces=False) == "".join(new)
    if steps == "llama2":  # a text begins without the space of its first word
        return
    stream, words = TextStream(TokenDecoder(found)), found("we need", add_special_tokens=False)["input_ids"]
    pieces = [stream.push(one) for at in ids for one in (*words, at)]
    assert "".join(pieces) + stream.close() == "".join(f"we need{one}" for one in new).replace("<x>", "")


ENDS: dict[str, tuple[dict[str, bool], list[str], list[str]]] = {
    "both": ({"add_bos_token": True, "add_eos_token": True}, ["<s>"], ["</s>"]),
    "the end alone": ({"add_bos_token": False, "add_eos_token": True}, [], ["</s>"]),
    "none": ({"add_bos_token": False, "add_eos_token": False}, [], []),
    "the end is asked for": ({"add_eos_token": True}, ["<s>"], ["</s>"]),
}
"""Flags, and the tokens around a text in the classes of transformers 4 that have them."""


@pytest.mark.quick_rows("the end alone-GemmaTokenizerFast", "none-LlamaTokenizer", "both-Qwen2Tokenizer")
@pytest.mark.parametrize("name", ["LlamaTokenizer", "LlamaTokenizerFast", "GemmaTokenizerFast", "Qwen2Tokenizer"])
@pytest.mark.parametrize("case", ENDS)
def test_flags_tell_what_is_around_a_text_in_the_classes_that_have_them(case: str, name: str, tmp_path: Path) -> None:
    flags, before, after = ENDS[case]
    file = trained_file("llama2", tmp_path)
    given = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": name, **flags}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(given))
    (tmp_path / "config.json").write_text('{"model_type": "mistral"}')
    begin, end = ([file.token_to_id(one) for one in tokens if name != "Qwen2Tokenizer"] for tokens in (before, after))
    found = load_tokenizer(tmp_path)
    for text in (TEXT, "we"):
        assert found(text)["input_ids"] == [*begin, *file.encode(text, add_special_tokens=False).ids, *end]


@pytest.mark.parametrize("name", ["LlamaTokenizerFast", "GemmaTokenizerFast", "PreTrainedTokenizerFast"])
def test_without_flags_the_file_tells_what_is_around_a_text(name: str, tmp_path: Path) -> None:
    file = trained_file("llama2", tmp_path)
    file.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    file.save(str(tmp_path / "tokenizer.json"))
    given = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": name}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(given))
    (tmp_path / "config.json").write_text('{"model_type": "mistral"}')
    assert load_tokenizer(tmp_path)(TEXT)["input_ids"] == file.encode(TEXT).ids


def test_a_prefix_that_the_configuration_asks_for_wins_over_the_file(tmp_path: Path) -> None:
    trained_file("gpt2", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": true}')
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    found = load_tokenizer(tmp_path)
    assert found("we")["input_ids"] == found(" we")["input_ids"]


@pytest.fixture(scope="module")
def ids(chatting: Path) -> list[int]:
    """Of a text, special tokens between its words."""
    tokenizer = load_tokenizer(chatting)
    found: list[int] = (
        tokenizer("the sea")["input_ids"] + tokenizer.all_special_ids + tokenizer(" is  deep .")["input_ids"]
    )
    return found


@pytest.mark.slow
def test_decoding_gives_the_text_of_transformers(chatting: Path, ids: list[int]) -> None:
    tokenizer = load_tokenizer(chatting)
    expected = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert "sea" in expected
    assert TokenDecoder(tokenizer)(ids) == expected


@pytest.mark.slow
def test_a_tokenizer_with_its_own_decoding_is_used(chatting: Path, ids: list[int]) -> None:
    assert "SEA" in TokenDecoder(Shouting.from_pretrained(chatting))(ids)


MODELS: dict[str, dict[str, Any]] = {
    "llama": {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "split_digits": True},
    "normalized": {"normalization_rule_name": "nmt_nfkc"},  # transformers 24233, OpenLLaMA
    "without a prefix": {"normalization_rule_name": "identity", "add_dummy_prefix": False},
    "unigram": {"model_type": "unigram", "normalization_rule_name": "nmt_nfkc"},
    "without bytes": {"model_type": "unigram", "byte_fallback": False, "vocab_size": 90},
    "unigram without a prefix": {"model_type": "unigram", "add_dummy_prefix": False},
}


PLACES = [("LlamaTokenizer", "tokenizer.model", kind) for kind in MODELS]
PLACES += [("T5Tokenizer", "spiece.model", kind) for kind in ("unigram", "without bytes", "unigram without a prefix")]


@pytest.mark.parametrize(("name", "file_name", "kind"), PLACES)
def test_a_file_of_sentencepiece_alone_gives_its_tokens(name: str, file_name: str, kind: str, tmp_path: Path) -> None:
    lines = iter(["the thermal fox x != y, how are you?", "\u00e9t\u00e9 (12,345) 2024", "def main(): print(1)"] * 30)
    size = {"vocab_size": 330, "hard_vocab_limit": False, "byte_fallback": True, "character_coverage": 1.0}
    options = {"model_type": "bpe", **size, "minloglevel": 2, **MODELS[kind]}
    with open(tmp_path / file_name, "wb") as file:
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=lines, model_writer=file, **options)
    settings = {"tokenizer_class": name, "extra_ids": 0, "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    found = load_tokenizer(tmp_path)
    reference = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / file_name))
    texts = ["thermal", "a  b", "x != y, 12345", "\uff21 full \ufb01", "tab\tline\nnew  ", "\u00e9t\u00e9 \u6771"]
    texts += [] if kind == "llama" else ["  two spaces first"]  # transformers adds no prefix before a space
    for text in texts:
        assert found.encode(text, add_special_tokens=False) == reference.encode(text), text
        ids = reference.encode(text)
        assert found.decode(ids) == reference.decode(ids).replace(" \N{DOUBLE QUESTION MARK} ", "<unk>")
