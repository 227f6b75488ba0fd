"""A tiny Llama that chats: graphs, a tokenizer of one token per character, and a chat template."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from llmconv.export.exporter import export
from tests.conftest import save_tiny

CONTEXT = 2048
"""Its tokens."""

LETTERS = [chr(code) for code in range(0x20, 0x7F)]
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'user' and message.content == 'bad' %}{{ raise_exception('bad is refused') }}{% endif %}"
    "[{{ message.role }}]{{ message.content }}[end]"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def save_chatting(folder: Path) -> Path:
    """Saves weights, graphs, tokenizer and chat template."""
    save_tiny("llama", folder, max_position_embeddings=CONTEXT)
    export(folder, prefill=True, incremental=True)
    vocabulary = {"<unk>": 0, **{letter: index + 1 for index, letter in enumerate(LETTERS)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", chat_template=TEMPLATE)
    fast.save_pretrained(folder)
    return folder
