"""Tiny models with tokenizers of the published forms: byte-level, and SentencePiece with bytes as fallback."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from llmconv.export.exporter import export
from tests.builders.tracing import trace_once
from tests.conftest import save_tiny

CONTEXT, COLUMNS = 4096, 512
TEXTS = (
    '{"name": "Ada", "age": 36, "tags": ["a", "b"], "city": null, "ok": true}',
    '{\n  "items": [1, 2.5, -3e4],\n  "nested": {"é": "✓ 語"}\n}',
    "The quick brown fox jumps over the lazy dog. It's 3.14, isn't it? </think> <think>",
)
END = "<|im_end|>"


def byte_level(special: Sequence[str] = (), added: Sequence[str] = ()) -> Tokenizer:
    """As of GPT-2, Llama 3 and Qwen: every byte has a token, and END is the last special one before `added`."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=340, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(TEXTS, trainer)
    made.add_special_tokens([AddedToken(text, special=True) for text in (*special, END)])
    made.add_tokens([AddedToken(text, special=False, normalized=False) for text in added])
    return made


def sentence_pieces(special: Sequence[str] = (), added: Sequence[str] = ()) -> Tokenizer:
    """As of Llama 2 and Mistral: `▁` for a space, which is left out at the start, and `<0x00>` for bytes."""
    known = ["<unk>", "<s>", END, *special, *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = sorted({letter for text in TEXTS for letter in text.replace(" ", "▁")} - {"語"})
    pieces = [*known, *letters, '▁"', '{"', "▁{", '":', '",']
    vocabulary = {piece: at for at, piece in enumerate(pieces)}
    merges = [("▁", '"'), ("{", '"'), ("▁", "{"), ('"', ":"), ('"', ",")]
    made = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    strip = decoders.Strip(content=" ", left=1, right=0)
    replace = decoders.Replace("▁", " ")
    made.decoder = decoders.Sequence([replace, decoders.ByteFallback(), decoders.Fuse(), strip])
    made.add_special_tokens([AddedToken(text, special=True) for text in ("<unk>", "<s>", END, *special)])
    made.add_tokens([AddedToken(text, special=False, normalized=False) for text in added])
    return made


TOKENIZERS = {"byte-level": byte_level, "sentencepiece": sentence_pieces}


def fast(made: Tokenizer, template: str | None = None) -> PreTrainedTokenizerFast:
    """As transformers opens it."""
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END, chat_template=template)


def save_worded(folder: Path, tokenizer: PreTrainedTokenizerFast) -> Path:
    """A Llama with graphs, whose logits have more columns than the tokenizer has tokens, as published models have.

    Its config is the same for every tokenizer, so that it is traced once.
    """
    trace_once()
    save_tiny("llama", folder, vocab_size=COLUMNS, max_position_embeddings=CONTEXT)
    export(folder, prefill=True, incremental=True)
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": tokenizer.eos_token_id}))
    return folder


HERMES_TEMPLATE = """\
{%- if tools %}<|im_start|>system
Tools:{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
Calls are written as <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking %}<think>
{% else %}<think>

</think>

{% endif %}{% endif %}"""
"""As of Qwen 3, whose `enable_thinking` begins the reasoning in the prompt."""

MISTRAL_TEMPLATE = """\
{%- for message in messages %}
{%- if message.role == 'user' %}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif -%}
[INST]{{ message.content }}[/INST]
{%- elif message.tool_calls %}{% for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('Tool call IDs have nine characters') }}{% endif %}
[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}{% endfor %}</s>
{%- elif message.role == 'tool' %}[TOOL_RESULTS]{{ message.content }}[/TOOL_RESULTS]
{%- else %}{{ message.content }}{% endif %}
{%- endfor %}"""

DEEPSEEK_TEMPLATE = """\
{%- for message in messages %}
{%- if message.role == 'assistant' and message.tool_calls is defined %}
{%- for call in message.tool_calls %}
{{- '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + call.function.name + '\\n```json\\n' }}
{{- call.function.arguments + '\\n```' }}
{%- endfor %}
{%- else %}{{ '[' + message.role + ']' + message.content }}{% endif %}
{%- endfor %}"""
"""As of DeepSeek-V3, which takes arguments as a text."""

SCRIPTED_TEMPLATE = (
    HERMES_TEMPLATE.partition("{%- if add_generation_prompt %}")[0]
    + """\
{%- if add_generation_prompt %}<|im_start|>assistant
{% if messages[-1].role == 'tool' %}<|after|>{% elif tools %}<|calls|>{% else %}<|begins|>{% endif %}{% endif %}"""
)
"""As HERMES_TEMPLATE, with a last token of the prompt that tells what comes next."""
ANSWER, THOUGHTS, RESULT = "Grüße, Wörld ✓", "Two and three.", "The sum is 5."
CALLS = ('{"name": "add", "arguments": {"a": 2, "b": 3}}', '{"name": "add", "arguments": {"a": 4, "b": 5}}')
SCRIPT = (
    ("<|begins|>", "Grüße, ", "Wörld ", "✓", END),
    ("<|calls|>", "<tool_call>", CALLS[0], "</tool_call>", "<tool_call>\n", CALLS[1], "</tool_call>\n", END),
    ("<|after|>", "<think>", THOUGHTS, "</think>", "The sum ", "is 5.", END),
)
"""What follows what: without tools ANSWER, with tools two calls, and after their results RESULT with THOUGHTS."""


def save_scripted(folder: Path) -> Path:
    """A Llama that says what SCRIPT has: its layers add nothing, and its head knows what follows each token."""
    pieces = dict.fromkeys(piece for chain in SCRIPT for piece in chain[1:-1])
    starts = [chain[0] for chain in SCRIPT]
    marks = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
    made = byte_level(["<|im_start|>", *starts], [*marks, *(one for one in pieces if one not in marks)])
    tokenizer = fast(made, SCRIPTED_TEMPLATE)
    trace_once()
    save_tiny("llama", folder, vocab_size=COLUMNS, max_position_embeddings=CONTEXT)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    tensors["model.norm.weight"].fill_(1)
    embedded = torch.nn.functional.normalize(torch.randn(COLUMNS, 64, generator=torch.Generator().manual_seed(0)))
    tensors["model.embed_tokens.weight"].copy_(embedded)
    head = tensors["lm_head.weight"].zero_()
    for chain in SCRIPT:
        for piece, following in pairwise(chain):
            (token,), (after,) = (tokenizer.encode(one, add_special_tokens=False) for one in (piece, following))
            head[after] += embedded[token]
    save_file(tensors, path, metadata={"format": "pt"})
    export(folder, prefill=True, incremental=True)
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": tokenizer.eos_token_id}))
    return folder
