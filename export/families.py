"""The registry of model families: one input map per `model_type` declares the inputs and outputs of its graphs.

The exporter, the verifier, the runner and the clients read this table. A family is one row; a family outside of the
package is one call of `register_input_map`, or an entry point in the group `llmconv.input_maps` whose object is a
`dict[str, InputMap]`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from llmconv.argument_checks import checked
from llmconv.checkpoint import read_json
from llmconv.errors import UnsupportedInput
from llmconv.export.input_map import InputMap
from llmconv.runtime.extra_inputs import (
    BATCH,
    DEEPSTACK,
    DEEPSTACK_LAYERS,
    FULL,
    ROTARY_AXES,
    SEQUENCE,
    SLIDING,
    ExtraInput,
)

DECODER = InputMap()
MASK_ALONE = InputMap(position_ids=False)  # no `position_ids`: the model counts positions itself
SEGMENTS = ExtraInput("token_type_ids", (BATCH, SEQUENCE), values="type_vocab_size", repeats=True)
"""The segment of each token, as BERT numbers them; a model with one segment has no such input."""


IMAGE_TOKENS = ExtraInput("token_type_ids", (BATCH, SEQUENCE), values=2, both_ways=(FULL, SLIDING))
"""Which tokens stand for features of images, 1 or 0; those of one image attend to each other in both directions."""

IMAGE_TOKENS_4 = ExtraInput(
    "mm_token_type_ids",
    (BATCH, SEQUENCE),
    values=lambda config: 2 if config.use_bidirectional_attention == "vision" else 1,
    both_ways=(SLIDING,),
)
"""The same in Gemma 4, of which only the large models have it, and only in layers with a window."""

TASKS = ExtraInput(  # the task that ERNIE is to do with each token
    "task_type_ids",
    (BATCH, SEQUENCE),
    values=lambda config: config.task_type_vocab_size if config.use_task_id else 1,
    repeats=True,
)

TEXT_MODEL = InputMap(note="its text model; images and sounds do not reach the graphs")

SEEING = InputMap(note="graphs of embeddings; images by `vision.onnx`")

THREE_AXES = InputMap(position_ids=False, extras=(ROTARY_AXES,), note="positions on three axes")
"""Qwen2-VL and later, where a position is one of time, row and column."""

DEEPSTACKED = InputMap(
    position_ids=False,
    extras=(ROTARY_AXES, DEEPSTACK),
    first_layers=DEEPSTACK_LAYERS,
    note="positions on three axes; features of images in its first layers",
)

CONTINUES = "graphs continue a state by several tokens, transformers by one"
"""transformers' selective scan of several tokens starts from zeros and ignores the cache."""

DECODERS = (  # tokens, mask and positions in; keys and values of every layer in and out
    *("afmoe", "apertus", "arcee", "aria_text", "axk1", "beam", "bert-generation", "biogpt", "bitnet", "codegen"),
    *("cohere", "cohere2", "cohere2_moe", "cohere_compass_text", "ctrl", "cwm", "deepseek_v2", "deepseek_v3"),
    *("diffllama", "doge", "dots1", "ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe", "falcon", "flex_olmo"),
    *("flint", "gemma", "gemma3_text", "gemma3n_text", "gemma4_text", "gemma4_unified_text", "glm", "glm4", "glm4_moe"),
    *("glm4_moe_lite", "gpt-sw3", "gpt_bigcode", "gpt_neo", "gpt_neox", "gpt_neox_japanese", "gpt_oss", "gptj"),
    *("granite", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoeshared", "helium", "hunyuan_v1_dense"),
    *("hunyuan_v1_moe", "hy_v3", "hyperclovax", "internlm3", "iquestcoder", "jais2", "kolibri1", "laguna", "llama"),
    *("llama4_text", "mellum", "mimo_v2_flash", "minicpm3", "minimax_m2", "minimax_m3_vl_text", "ministral"),
    *("ministral3", "mixtral", "modernbert-decoder", "nanochat", "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "opt"),
    *("persimmon", "phi", "phi3", "phimoe", "qwen2_moe", "qwen3_moe", "seed_oss", "smollm3", "solar_open", "stablelm"),
    *("starcoder2", "vaultgemma"),
)

MASKED = (
    *("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "mpt", "mvp", "pegasus"),
    *("plbart", "trocr", "whisper"),
)

WITH_SEGMENTS = (
    *("bert", "big_bird", "camembert", "data2vec-text", "electra", "megatron-bert", "rembert", "roberta"),
    *("roberta-prelayernorm", "roc_bert", "xlm-roberta", "xlm-roberta-xl"),
)

INPUT_MAPS: dict[str, InputMap] = {
    **dict.fromkeys(DECODERS, DECODER),
    **dict.fromkeys(MASKED, MASK_ALONE),
    **dict.fromkeys(WITH_SEGMENTS, InputMap(extras=(SEGMENTS,))),
    **dict.fromkeys(("fuyu", "gemma4_unified", "phi4_multimodal"), TEXT_MODEL),
    "bailing_hybrid": InputMap(
        cache="channel_delta_rule", note="delta rule with a decay per channel, latent attention, experts"
    ),
    "bamba": InputMap(cache="state_space", note="Mamba-2 and attention layers"),
    "bloom": InputMap(position_ids=False, note="ALiBi from the attention mask; its own attention code"),
    "ernie": InputMap(extras=(SEGMENTS, TASKS)),
    "falcon_h1": InputMap(cache="state_space", note="Mamba-2 and attention side by side in every layer"),
    "falcon_mamba": InputMap(
        position_ids=False, cache="selective_scan", note=f"Mamba with norms on its time step; {CONTINUES}"
    ),
    "gemma2": InputMap(note="alternating sliding window, logit soft-capping"),
    "gemma3": InputMap(image_extras=(IMAGE_TOKENS,), note="tokens of an image attend to each other in both directions"),
    "gemma4": InputMap(image_extras=(IMAGE_TOKENS_4,), note="its text model; large ones take images with `--embeds`"),
    "got_ocr2": SEEING,
    "gpt2": InputMap(note="learned positions, Conv1D weights, tied head"),
    "granitemoehybrid": InputMap(
        position_ids=False, cache="state_space", note="Mamba-2 and attention layers without positions, experts"
    ),
    "jamba": InputMap(position_ids=False, cache="selective_scan", note=f"Mamba, attention, experts; {CONTINUES}"),
    "kimi_linear": InputMap(
        position_ids=False,
        cache="channel_delta_rule",
        note="delta rule with a decay per channel, latent attention, experts",
    ),
    "lfm2": InputMap(cache="convolution", note="short convolutions and attention layers"),
    "lfm2_moe": InputMap(cache="convolution", note="short convolutions and attention layers, experts"),
    "lfm3": InputMap(cache="convolution", note="short convolutions, sliding and full attention layers"),
    "llama4": SEEING,
    "mamba": InputMap(position_ids=False, cache="selective_scan", note=f"no attention; {CONTINUES}"),
    "mamba2": InputMap(position_ids=False, cache="state_space", note="no attention"),
    "mistral": InputMap(note="sliding window where the config has one"),
    "moshi": InputMap(note="its text decoder; sounds do not reach the graphs"),
    "moss_transcribe_diarize": InputMap(position_ids=False, note="its text model; sounds do not reach the graphs"),
    "nemotron_h": InputMap(
        position_ids=False, cache="state_space", note="Mamba-2, attention without positions, MLP and expert layers"
    ),
    "olmo_hybrid": InputMap(cache="delta_rule", note="gated delta rule and attention layers"),
    "qwen2": InputMap(note="biases on query, key and value"),
    "qwen2_5_vl": THREE_AXES,
    "qwen2_vl": THREE_AXES,
    "qwen3": InputMap(note="norms on query and key"),
    "qwen3_5": InputMap(cache="delta_rule", note="its text model: gated delta rule and gated attention layers"),
    "qwen3_5_moe": InputMap(
        cache="delta_rule", note="its text model: gated delta rule and gated attention layers, experts"
    ),
    "qwen3_5_moe_text": InputMap(cache="delta_rule", note="gated delta rule and gated attention layers, experts"),
    "qwen3_5_text": InputMap(cache="delta_rule", note="gated delta rule and gated attention layers"),
    "qwen3_next": InputMap(cache="delta_rule", note="gated delta rule and gated attention layers, experts"),
    "qwen3_vl": DEEPSTACKED,
    "qwen3_vl_moe": replace(DEEPSTACKED, note=f"{DEEPSTACKED.note}, experts"),
    "roformer": InputMap(position_ids=False, extras=(SEGMENTS,)),
    "youtu": InputMap(
        note="transformers zeroes the embedding of the padding token when it loads the model, a graph does not"
    ),
    "zamba2": InputMap(cache="state_space", note="Mamba-2 and layers with a shared transformer before it"),
}


MULTI_MODAL = {  # types whose language model is exported, with an input map of its own `model_type`
    *("aya_vision", "gemma3", "gemma4", "got_ocr2", "idefics3", "internvl", "llama4", "llava", "llava_next"),
    *("llava_onevision", "mistral3", "qwen2_5_vl", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe", "smolvlm", "vipllava"),
}
TOKENS_FIRST = {"gemma4"}  # those whose graphs take tokens and no images, unless embeddings are asked for


def is_multi_modal(fields: Mapping[str, Any], *, embeds: bool) -> bool:
    """Whether graphs of the model with this `config.json` take embeddings of text and features of images."""
    kind = fields.get("model_type")
    return kind in MULTI_MODAL and (kind not in TOKENS_FIRST or (embeds and bool(fields.get("vision_config"))))


@checked
def register_input_map(model_type: str, input_map: InputMap) -> None:
    """Adds or replaces the input map of a `model_type`."""
    INPUT_MAPS[model_type] = input_map


@cache
def _load_entry_points() -> None:
    for entry in entry_points(group="llmconv.input_maps"):
        for model_type, input_map in entry.load().items():
            INPUT_MAPS.setdefault(model_type, input_map)


def known_input_maps() -> dict[str, InputMap]:
    _load_entry_points()
    return INPUT_MAPS


def extra_inputs_of(folder: Path) -> tuple[ExtraInput, ...]:
    """The extra inputs of the language model in a folder, including those that only graphs with images have.

    Empty for a family without an input map. Raises MalformedInput: `config.json` is invalid.
    """
    row, fields = _row_of(folder)
    found = []
    for extra in (*row.extras, *row.image_extras) if row else ():
        with suppress(UnsupportedInput):  # its number of values, if `config.json` alone states it
            extra = replace(extra, values=extra.number_of_values(SimpleNamespace(**fields)))
        found.append(extra)
    return tuple(found)


def image_inputs_of(folder: Path) -> tuple[str, ...]:
    """The extra inputs of a folder's model that only graphs with images have; MalformedInput for a bad config."""
    row, _ = _row_of(folder)
    return tuple(extra.name for extra in row.image_extras) if row else ()


def _row_of(folder: Path) -> tuple[InputMap | None, dict[str, Any]]:
    """The input map of the model in a folder, if it has one, and `config.json`."""
    path = folder / "config.json"
    fields = read_json(path) if path.is_file() else {}
    text = fields.get("text_config")
    types = [part.get("model_type") for part in (fields, text) if isinstance(part, dict)]
    rows = [known_input_maps()[name] for name in types if isinstance(name, str) and name in known_input_maps()]
    return (rows[0] if rows else None), fields


def find_input_map(model_type: str) -> InputMap:
    """The input map of a `model_type`; UnsupportedInput, with close matches or the reason, for an unknown one."""
    table = known_input_maps()
    if model_type in table:
        return table[model_type]
    if reason := NOT_EXPORTED.get(model_type):
        raise UnsupportedInput(
            f"models of type `{model_type}` are not exported: {reason}",
            hint="docs/families.md lists the types that are exported, and the reason for each other type",
        )
    if model_type in OWN_CODE:
        raise UnsupportedInput(
            f"models of type `{model_type}` are converted, but not exported: {OWN_CODE[model_type]}",
            hint="`llmconv generate MODEL --backend torch --trust-remote-code` runs it; docs/own-code.md has such "
            "models, and what graphs of one take",
        )
    close = difflib.get_close_matches(model_type, table, n=3, cutoff=0.7)
    matches = f" (close matches: {', '.join(close)})" if close else ""
    raise UnsupportedInput(
        f"no input map for model_type `{model_type}`{matches}",
        hint="`llmconv families` lists the table; docs/adding-a-family.md describes how to add a row",
    )


FEATURES = "its decoder also reads features of images or sounds, which graphs of text do not take"
NOT_EXPORTED: dict[str, str] = {
    **dict.fromkeys(
        (
            *("axk2", "deepseek_v32", "dots3_note", "dots3_note_text"),
            *("glm_moe_dsa", "hy_v4", "qwen4_exp", "qwen4_exp_text"),
        ),
        "its sparse attention chooses keys with an indexer, whose own keys are a third kind of cache",
    ),
    **dict.fromkeys(("openai-gpt", "xlm"), "transformers has no cache of keys and values for it"),
    **dict.fromkeys(("git", "mllama"), FEATURES),
    **dict.fromkeys(
        ("inkling2_text", "inkling_text", "minimax", "recurrent_gemma", "rwkv", "xlstm", "zamba", "zaya"),
        "its layers keep states of a kind that no graph computes yet",
    ),
    **dict.fromkeys(
        ("dbrx", "jetmoe", "longcat_flash"),
        "its code for experts loops over values, which cannot be traced",
    ),
    **dict.fromkeys(("musicgen", "musicgen_melody"), "it generates codes of sounds, several for each step"),
    **dict.fromkeys(
        ("gemma4_assistant", "gemma4_unified_assistant"),
        "it continues the hidden states of another model, which a graph alone does not have",
    ),
    "blt": "it reads bytes in patches, whose lengths a second model decides",
    "cpmant": "its attention adds segments and a prompt of its own before the tokens",
    "deepseek_v4": "its attention keeps compressed keys next to those of a window",
    "emu3": "its images are tokens of a second vocabulary, which a quantizer of images makes",
    "gemma3n": f"{FEATURES}; its text model alone is `gemma3n_text`",
    "hrm_text": "it runs the same layers several times for each token, with a cache entry for each run",
    "prophetnet": "its attention predicts several tokens at once, in streams of their own",
    "reformer": "its attention sorts tokens into buckets by their hashes",
    "xglm": "its table of positions has a row of zeros, which `verify` cannot tell from a changed graph",
    "xlnet": "its cache keeps the hidden states of earlier texts instead of keys and values",
    "xmod": "it needs the language of each text as an input",
}
"""The reason in words, by `model_type`; `llmconv families` and docs/families.md list them."""

OWN_CODE: dict[str, str] = {  # types that conversions write for the code of their publishers
    "baichuan": "its code is its own, not of transformers, and no input map describes it",
    "chatglm": "its code is its own, not of transformers, and no input map describes it; ChatGLM2 and later are `glm`",
}
