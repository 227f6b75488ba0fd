"""The registry of model families: one input map per `model_type` declares the inputs and outputs of its graphs.

The exporter, the verifier, the runner and the clients read this table. A family is one row; a family outside of the
package is one call of `register_input_map`, or an entry point in the group `llmconv.input_maps` whose object is a
`dict[str, InputMap]`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
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
from llmconv.runtime.extra_inputs import BATCH, FULL, SEQUENCE, SLIDING, ExtraInput
from llmconv.runtime.images.qwen_vl import DEEPSTACK, DEEPSTACK_LAYERS, ROTARY_AXES

ENTRY_POINTS = "llmconv.input_maps"


DECODER = InputMap()
MASK_ALONE = InputMap(position_ids=False)  # no `position_ids`: the model counts positions itself
SEGMENTS = ExtraInput("token_type_ids", (BATCH, SEQUENCE), values="type_vocab_size", repeats=True)
"""The segment of each token, as BERT numbers them; a model with one segment has no such input."""

SEGMENTED = InputMap(extras=(SEGMENTS,))

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

INPUT_MAPS: dict[str, InputMap] = {
    "afmoe": DECODER,
    "apertus": DECODER,
    "arcee": DECODER,
    "aria_text": DECODER,
    "axk1": DECODER,
    "bailing_hybrid": InputMap(
        cache="channel_delta_rule", note="delta rule with a decay per channel, latent attention, experts"
    ),
    "bamba": InputMap(cache="state_space", note="Mamba-2 and attention layers"),
    "bart": MASK_ALONE,
    "beam": DECODER,
    "bert": SEGMENTED,
    "bert-generation": DECODER,
    "big_bird": SEGMENTED,
    "bigbird_pegasus": MASK_ALONE,
    "biogpt": DECODER,
    "bitnet": DECODER,
    "blenderbot": MASK_ALONE,
    "blenderbot-small": MASK_ALONE,
    "bloom": InputMap(position_ids=False, note="ALiBi from the attention mask; its own attention code"),
    "camembert": SEGMENTED,
    "codegen": DECODER,
    "cohere": DECODER,
    "cohere2": DECODER,
    "cohere2_moe": DECODER,
    "cohere_compass_text": DECODER,
    "ctrl": DECODER,
    "cwm": DECODER,
    "data2vec-text": SEGMENTED,
    "deepseek_v2": DECODER,
    "deepseek_v3": DECODER,
    "diffllama": DECODER,
    "doge": DECODER,
    "dots1": DECODER,
    "electra": SEGMENTED,
    "ernie": InputMap(extras=(SEGMENTS, TASKS)),
    "ernie4_5": DECODER,
    "ernie4_5_moe": DECODER,
    "exaone4": DECODER,
    "exaone_moe": DECODER,
    "falcon": DECODER,
    "falcon_h1": InputMap(cache="state_space", note="Mamba-2 and attention side by side in every layer"),
    "falcon_mamba": InputMap(
        position_ids=False, cache="selective_scan", note=f"Mamba with norms on its time step; {CONTINUES}"
    ),
    "flex_olmo": DECODER,
    "flint": DECODER,
    "fuyu": TEXT_MODEL,
    "gemma": DECODER,
    "gemma2": InputMap(note="alternating sliding window, logit soft-capping"),
    "gemma3": InputMap(image_extras=(IMAGE_TOKENS,), note="tokens of an image attend to each other in both directions"),
    "gemma3_text": DECODER,
    "gemma3n_text": DECODER,
    "gemma4": InputMap(image_extras=(IMAGE_TOKENS_4,), note="its text model; large ones take images with `--embeds`"),
    "gemma4_text": DECODER,
    "gemma4_unified": TEXT_MODEL,
    "gemma4_unified_text": DECODER,
    "glm": DECODER,
    "glm4": DECODER,
    "glm4_moe": DECODER,
    "glm4_moe_lite": DECODER,
    "got_ocr2": SEEING,
    "gpt-sw3": DECODER,
    "gpt2": InputMap(note="learned positions, Conv1D weights, tied head"),
    "gpt_bigcode": DECODER,
    "gpt_neo": DECODER,
    "gpt_neox": DECODER,
    "gpt_neox_japanese": DECODER,
    "gpt_oss": DECODER,
    "gptj": DECODER,
    "granite": DECODER,
    "granite_swa": DECODER,
    "granitemoe": DECODER,
    "granitemoe_swa": DECODER,
    "granitemoehybrid": InputMap(
        position_ids=False, cache="state_space", note="Mamba-2 and attention layers without positions, experts"
    ),
    "granitemoeshared": DECODER,
    "helium": DECODER,
    "hunyuan_v1_dense": DECODER,
    "hunyuan_v1_moe": DECODER,
    "hy_v3": DECODER,
    "hyperclovax": DECODER,
    "internlm3": DECODER,
    "iquestcoder": DECODER,
    "jais2": DECODER,
    "jamba": InputMap(position_ids=False, cache="selective_scan", note=f"Mamba, attention, experts; {CONTINUES}"),
    "kimi_linear": InputMap(
        position_ids=False,
        cache="channel_delta_rule",
        note="delta rule with a decay per channel, latent attention, experts",
    ),
    "kolibri1": DECODER,
    "laguna": DECODER,
    "lfm2": InputMap(cache="convolution", note="short convolutions and attention layers"),
    "lfm2_moe": InputMap(cache="convolution", note="short convolutions and attention layers, experts"),
    "lfm3": InputMap(cache="convolution", note="short convolutions, sliding and full attention layers"),
    "llama": DECODER,
    "llama4": SEEING,
    "llama4_text": DECODER,
    "mamba": InputMap(position_ids=False, cache="selective_scan", note=f"no attention; {CONTINUES}"),
    "mamba2": InputMap(position_ids=False, cache="state_space", note="no attention"),
    "marian": MASK_ALONE,
    "mbart": MASK_ALONE,
    "megatron-bert": SEGMENTED,
    "mellum": DECODER,
    "mimo_v2_flash": DECODER,
    "minicpm3": DECODER,
    "minimax_m2": DECODER,
    "minimax_m3_vl_text": DECODER,
    "ministral": DECODER,
    "ministral3": DECODER,
    "mistral": InputMap(note="sliding window where the config has one"),
    "mixtral": DECODER,
    "modernbert-decoder": DECODER,
    "moshi": InputMap(note="its text decoder; sounds do not reach the graphs"),
    "moss_transcribe_diarize": InputMap(position_ids=False, note="its text model; sounds do not reach the graphs"),
    "mpt": MASK_ALONE,
    "mvp": MASK_ALONE,
    "nanochat": DECODER,
    "nemotron": DECODER,
    "nemotron_h": InputMap(
        position_ids=False, cache="state_space", note="Mamba-2, attention without positions, MLP and expert layers"
    ),
    "olmo": DECODER,
    "olmo2": DECODER,
    "olmo3": DECODER,
    "olmo_hybrid": InputMap(cache="delta_rule", note="gated delta rule and attention layers"),
    "olmoe": DECODER,
    "opt": DECODER,
    "pegasus": MASK_ALONE,
    "persimmon": DECODER,
    "phi": DECODER,
    "phi3": DECODER,
    "phi4_multimodal": TEXT_MODEL,
    "phimoe": DECODER,
    "plbart": MASK_ALONE,
    "qwen2": InputMap(note="biases on query, key and value"),
    "qwen2_5_vl": THREE_AXES,
    "qwen2_moe": DECODER,
    "qwen2_vl": THREE_AXES,
    "qwen3": InputMap(note="norms on query and key"),
    "qwen3_5": InputMap(cache="delta_rule", note="its text model: gated delta rule and gated attention layers"),
    "qwen3_5_moe": InputMap(
        cache="delta_rule", note="its text model: gated delta rule and gated attention layers, experts"
    ),
    "qwen3_5_moe_text": InputMap(cache="delta_rule", note="gated delta rule and gated attention layers, experts"),
    "qwen3_5_text": InputMap(cache="delta_rule", note="gated delta rule and gated attention layers"),
    "qwen3_moe": DECODER,
    "qwen3_next": InputMap(cache="delta_rule", note="gated delta rule and gated attention layers, experts"),
    "qwen3_vl": DEEPSTACKED,
    "qwen3_vl_moe": replace(DEEPSTACKED, note=f"{DEEPSTACKED.note}, experts"),
    "rembert": SEGMENTED,
    "roberta": SEGMENTED,
    "roberta-prelayernorm": SEGMENTED,
    "roc_bert": SEGMENTED,
    "roformer": InputMap(position_ids=False, extras=(SEGMENTS,)),
    "seed_oss": DECODER,
    "smollm3": DECODER,
    "solar_open": DECODER,
    "stablelm": DECODER,
    "starcoder2": DECODER,
    "trocr": MASK_ALONE,
    "vaultgemma": DECODER,
    "whisper": MASK_ALONE,
    "xlm-roberta": SEGMENTED,
    "xlm-roberta-xl": SEGMENTED,
    "youtu": InputMap(
        note="transformers zeroes the embedding of the padding token when it loads the model, a graph does not"
    ),
    "zamba2": InputMap(cache="state_space", note="Mamba-2 and layers with a shared transformer before it"),
}


MULTI_MODAL: dict[str, str] = {
    "aya_vision": "",
    "gemma3": "",
    "gemma4": "",
    "got_ocr2": "",
    "idefics3": "",
    "internvl": "",
    "llama4": "",
    "llava": "",
    "llava_next": "",
    "llava_onevision": "",
    "mistral3": "",
    "qwen2_5_vl": "",
    "qwen2_vl": "",
    "qwen3_vl": "",
    "qwen3_vl_moe": "",
    "smolvlm": "",
    "vipllava": "",
}
"""`model_type` to a limit of the language model alone, whose own `model_type` has an input map."""


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
    for entry in entry_points(group=ENTRY_POINTS):
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
    config = SimpleNamespace(**fields)
    return tuple(_with_stated(extra, config) for extra in (*row.extras, *row.image_extras)) if row else ()


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


def _with_stated(extra: ExtraInput, config: SimpleNamespace) -> ExtraInput:
    """An extra input with its number of values, if `config.json` alone states it."""
    try:
        return replace(extra, values=extra.number_of_values(config))
    except UnsupportedInput:
        return extra


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


INDEXER = "its sparse attention chooses keys with an indexer, whose own keys are a third kind of cache"
NO_CACHE = "transformers has no cache of keys and values for it"
FEATURES = "its decoder also reads features of images or sounds, which graphs of text do not take"
STATES = "its layers keep states of a kind that no graph computes yet"
LOOP = "its code for experts loops over values, which cannot be traced"
SOUNDS = "it generates codes of sounds, several for each step"
DRAFT = "it continues the hidden states of another model, which a graph alone does not have"

NOT_EXPORTED: dict[str, str] = {
    "axk2": INDEXER,
    "blt": "it reads bytes in patches, whose lengths a second model decides",
    "cpmant": "its attention adds segments and a prompt of its own before the tokens",
    "dbrx": LOOP,
    "deepseek_v32": INDEXER,
    "deepseek_v4": "its attention keeps compressed keys next to those of a window",
    "dots3_note": INDEXER,
    "dots3_note_text": INDEXER,
    "emu3": "its images are tokens of a second vocabulary, which a quantizer of images makes",
    "gemma3n": f"{FEATURES}; its text model alone is `gemma3n_text`",
    "gemma4_assistant": DRAFT,
    "gemma4_unified_assistant": DRAFT,
    "git": FEATURES,
    "glm_moe_dsa": INDEXER,
    "hrm_text": "it runs the same layers several times for each token, with a cache entry for each run",
    "hy_v4": INDEXER,
    "inkling2_text": STATES,
    "inkling_text": STATES,
    "jetmoe": LOOP,
    "longcat_flash": LOOP,
    "minimax": STATES,
    "mllama": FEATURES,
    "musicgen": SOUNDS,
    "musicgen_melody": SOUNDS,
    "openai-gpt": NO_CACHE,
    "prophetnet": "its attention predicts several tokens at once, in streams of their own",
    "qwen4_exp": INDEXER,
    "qwen4_exp_text": INDEXER,
    "recurrent_gemma": STATES,
    "reformer": "its attention sorts tokens into buckets by their hashes",
    "rwkv": STATES,
    "xglm": "its table of positions has a row of zeros, which `verify` cannot tell from a changed graph",
    "xlm": NO_CACHE,
    "xlnet": "its cache keeps the hidden states of earlier texts instead of keys and values",
    "xlstm": STATES,
    "xmod": "it needs the language of each text as an input",
    "zamba": STATES,
    "zaya": STATES,
}
"""The reason in words, by `model_type`; `llmconv families` and docs/families.md list them."""

OWN_CODE: dict[str, str] = {  # types that conversions write for the code of their publishers
    "baichuan": "its code is its own, not of transformers, and no input map describes it",
    "chatglm": "its code is its own, not of transformers, and no input map describes it; ChatGLM2 and later are `glm`",
}
