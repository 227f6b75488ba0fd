"""What a `config.json` says: whether it is a causal language model, the only kind that commands run, and its lengths.

The context length, where rotary frequencies change, whether attention has a window, and what transformers before 4.26
wrote there about generation. Sources: transformers modeling_rope_utils.py; for what a scaled model reaches, the model
cards of Qwen2.5 (`yarn`), Vicuna 16k (`linear`) and Gemma 3, and vLLM's `_get_and_verify_max_len`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmconv.checkpoint import read_json
from llmconv.errors import MalformedInput, UnsupportedInput
from llmconv.files.paths import kind_of

# suffixes of transformers' classes whose heads do not predict the next token
OTHER_HEADS = (
    *("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "ForMultipleChoice"),
    *("ForMaskedLM", "ForPreTraining", "ForNextSentencePrediction", "ForImageClassification"),
    *("ForAudioClassification", "ForSpeechSeq2Seq", "ForCTC", "ForReward", "RewardModel", "EncoderModel"),
    "ForSequenceEmbedding",
)
CAUSAL = ("ForCausalLM", "LMHeadModel", "DoubleHeadsModel", "ForConditionalGeneration", "WithLMHead")
# types whose class for causal language models attends to later tokens, too, unless `is_decoder` is set
ENCODERS = frozenset(
    (
        *("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert"),
        *("reformer", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta"),
        *("xlm-roberta-xl", "xmod"),
    )
)
# encoder-decoders without a causal language model in transformers
ENCODER_DECODERS = {"t5", "mt5", "umt5", "longt5", "switch_transformers", "t5gemma", "led", "m2m_100", "whisper"}


def require_model_type(config: Mapping[str, Any], source: str | Path) -> None:
    """Raises MalformedInput if `model_type`, supported or not, is missing, empty, or not a string."""
    kind = config.get("model_type")
    if isinstance(kind, str) and kind.strip():
        return
    problem = f"`config.json` has a `model_type` that is {kind_of(kind)}, not a string"
    if kind is None or isinstance(kind, str):
        problem = "`config.json` has no `model_type`"
    hint = "copy the model's own `config.json` into the folder; a `model_type` is a string such as `llama`"
    raise MalformedInput(f"`{source}` is not a usable Hugging Face model folder: its {problem}", hint=hint)


# fields of almost every config that are positive integers, or lists of one per layer
SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")


def require_sizes(config: Mapping[str, Any], source: str | Path) -> None:
    """Raises MalformedInput unless `model_type` and sizes, also of `text_config`, have valid types where given."""
    if config.get("model_type") is not None:
        require_model_type(config, source)
    text = config.get("text_config")
    for fields in (config, text if isinstance(text, dict) else {}):
        for name in SIZES:
            value = fields.get(name)
            is_number = isinstance(value, int) and not isinstance(value, bool) and value > 0
            if value is not None and not is_number and not isinstance(value, list):
                problem = f"`config.json` of `{source}` has `{name}` {value!r:.40}, which is not a positive integer"
                raise MalformedInput(problem, hint="correct it, or copy the model's own `config.json` into the folder")


def is_encoder(config: Mapping[str, Any]) -> bool:
    """Whether tokens attend to later ones, whatever class `architectures` names; `is_decoder` is False by default."""
    return config.get("model_type") in ENCODERS and config.get("is_decoder") is not True


def require_causal(config: Mapping[str, Any], source: str | Path) -> None:
    """Raises UnsupportedInput if `architectures` names an encoder, a classifier or an encoder-decoder."""
    require_sizes(config, source)
    declared = config.get("architectures")
    names = [name for name in declared if isinstance(name, str)] if isinstance(declared, list) else []
    shown = f": `architectures` is {names[0]}" if names else ""
    kind = str(config.get("model_type"))
    has_decoder = any(name.endswith("ForCausalLM") for name in names)
    if not has_decoder and (kind in ENCODER_DECODERS or config.get("is_encoder_decoder") is True):
        hint = "only decoder-only (causal) language models are exported; `optimum-cli export onnx` exports this one"
        raise UnsupportedInput(f"`{source}` is an encoder-decoder ({kind}), which is not supported{shown}", hint=hint)
    may_be = [name for name in names if not name.endswith(OTHER_HEADS)]  # unknown classes may predict the next token
    if names and not any(any(part in name for part in CAUSAL) or not name.endswith("Model") for name in may_be):
        task = next((task for task, fits in OTHER_TASKS.items() if any(map(fits, names))), "")
        raise UnsupportedInput(
            f"`{source}` is not a causal language model{shown}",
            hint="`llmconv to-hf MODEL -o OUT` makes a classifier of OpenRLHF's reward model, for `--task classify`"
            if "RewardModel" in names
            else f"for a decoder `llmconv export MODEL --task {task}`; `optimum-cli export onnx` exports encoders"
            + _tied_hint(config, task)
            if task
            else "give a model with a language-modeling head, such as LlamaForCausalLM; `optimum-cli export onnx` "
            "exports encoders",
        )
    if is_encoder(config):
        raise UnsupportedInput(
            f"`{source}` is an encoder{shown}, and a {kind} without `is_decoder` attends to later tokens",
            hint='a decoder has `"is_decoder": true` in `config.json`, as it was trained; `optimum-cli export onnx` '
            "exports encoders",
        )


def _tied_hint(config: Mapping[str, Any], task: str) -> str:
    """What makes a language model of one that its base class saved, if its head is the embedding."""
    if task != "embed" or config.get("tie_word_embeddings") is not True:
        return ""
    named = "it needs the class with one (such as `Qwen3ForCausalLM`) in `architectures`"
    return f"; as a language model, whose head is the embedding, {named}"


# tasks of models without a language-modeling head, by the class in `architectures`
OTHER_TASKS: dict[str, Callable[[str], bool]] = {
    "embed": lambda name: name.endswith("Model") and not name.endswith(OTHER_HEADS),
    "classify": lambda name: name.endswith("ForSequenceClassification"),
}


def require_task(config: Mapping[str, Any], source: str | Path, task: str) -> None:
    """Raises UnsupportedInput if the class in `architectures` does not fit the task of `export`, such as `classify`."""
    require_sizes(config, source)
    declared = config.get("architectures")
    names = [name for name in declared if isinstance(name, str)] if isinstance(declared, list) else []
    if task in OTHER_TASKS and any(map(OTHER_TASKS[task], names)) and config.get("is_encoder_decoder") is not True:
        return
    if task == "classify" and names:
        hint = "give a model such as Qwen3ForSequenceClassification; `--task rerank` scores with a language model"
        raise UnsupportedInput(f"`{source}` has no head for classes: `architectures` is {names[0]}", hint=hint)
    require_causal(config, source)


def require_causal_folder(folder: Path, task: str = "generate") -> None:
    """Like `require_task`, for the `config.json` of a folder, if it exists."""
    if (folder / "config.json").is_file():
        require_task(read_json(folder / "config.json"), folder, task)


OWN_LENGTH = "model_max_length"
"""Of tokenizers, and of Cohere's models, which declare a shorter `max_position_embeddings` (Command-R 8,192 of 131,072
tokens); their rotary embedding has no table."""

LENGTHS = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_seq_len",
    "max_target_positions",
    "max_sequence_length",
    "seq_length",
    OWN_LENGTH,
)
"""Fields of `config.json`: the fourth of MPT, then of Whisper's decoder and of models with code of their own; most
models with ALiBi or states have none."""

ORIGINAL = "original_max_position_embeddings"
# families that transformers' `generate` reads again from the start when a text outgrows the original context
LIKE_PHI3 = ("phi3", "phi4_multimodal", "phimoe")
LONGEST = 1 << 40  # maximum in tokens; larger numbers are not context lengths
# fields with the size of a window: `sliding_window` in most families, `window_size` in GPT-Neo, and others
WINDOW = re.compile(r"(?!max_)\w*(window(s|_size|_sizes|_len)?|attention_chunk_size|local_attention)")


def language_config(folder: Path) -> dict[str, Any]:
    """A folder's `config.json`, with the fields of its `text_config` on top; empty if there is no such file."""
    path = folder / "config.json"
    config: dict[str, Any] = read_json(path) if path.is_file() else {}
    text = config.get("text_config")
    return {**config, **(text if isinstance(text, dict) else {})}


def require_one_attention(config: Any) -> None:
    """Raises UnsupportedInput for a model that transformers itself computes in two ways.

    Falcon's eager attention, which is traced and which `verify` compares with, adds the biases of `alibi` twice: they
    are in the mask already (transformers 5.23). Its SDPA, with which models run, adds them once.
    """
    if getattr(config, "model_type", "") == "falcon" and getattr(config, "alibi", False):
        raise UnsupportedInput(
            "models of type `falcon` with `alibi` are not exported or verified: transformers computes them in two ways",
            hint="`llmconv generate MODEL --backend torch` runs it as transformers does",
        )


def require_rotary(fields: Mapping[str, Any], config: Any) -> None:
    """Raises UnsupportedInput where transformers turns more of each head than `rotary_dim` of a `config.json` says.

    `config` is what it makes of the fields. MiniMax's files have this older name, which transformers 5.16 does not read
    for MiniMax-M2, nor 5.23 for MiniMax-M3. What transformers 5 itself wrote (`rope_parameters`) counts as it is.
    """
    text = fields.get("text_config")
    fields = {**fields, **(text if isinstance(text, Mapping) else {})}
    turned = fields.get("rotary_dim")
    if not isinstance(turned, int) or "rope_parameters" in fields:
        return
    made = config.get_text_config(decoder=True)
    rope, size = getattr(made, "rope_parameters", None), getattr(made, "head_dim", None)
    if not isinstance(rope, Mapping) or not isinstance(size, int):
        return
    part = rope.get("partial_rotary_factor") or 1.0
    if 0 < turned < int(size * part):
        raise UnsupportedInput(
            f"`rotary_dim` of `config.json` is {turned}, and transformers would turn {int(size * part)} of the {size} "
            "numbers of each head",
            hint=f'add `"partial_rotary_factor": {turned / size:g}` to `config.json`, next to `rotary_dim`',
        )


MTP = re.compile(r"(?:^|\.)mtp(?:_layers|_dspark)?\.")
MTP_LAYER = re.compile(r"(.*\blayers\.(\d{1,9})\.)eh_proj\.weight")


def mtp_tensors(names: Iterable[str], config: Mapping[str, Any]) -> list[str]:
    """The names of the tensors of MTP heads, which predict further tokens, among those of a checkpoint.

    They are named `mtp` (Qwen3-Next, MiMo), or in a layer after the last with an `eh_proj` (DeepSeek-V3, GLM-4.5).
    """
    names, text = list(names), config.get("text_config")
    layers = (text if isinstance(text, Mapping) else config).get("num_hidden_layers")
    found = [match for name in names if (match := MTP_LAYER.fullmatch(name))]
    starts = tuple(match[1] for match in found if isinstance(layers, int) and int(match[2]) >= layers)
    return [name for name in names if MTP.search(name) or name.startswith(starts)]


def context_length(folder: Path) -> int | None:
    """Maximum number of tokens from a folder's `config.json`; None if it declares none."""
    return length_of(language_config(folder))


def length_of(config: Mapping[str, Any]) -> int | None:
    """Tokens that a language model's config declares, or that its rotary scaling reaches beyond; None for neither."""
    declared = _declared(config)
    if declared is None:
        return None
    reached = [_reach(one, declared, is_flat) for one, is_flat in _rotary(config)]
    return int(min(max(declared, *reached, 0), LONGEST))


@dataclass(frozen=True)
class LengthSwitch:
    """Where the rotary frequencies of all tokens of a call change with the length of the sequence."""

    tokens: int  # length of the longest sequence with the original frequencies
    reads_again: bool = False  # a text that outgrows it while it is generated is read again from the start


def is_dynamic(kind: object) -> bool:
    """Whether a `rope_type` has frequencies that follow the length of the text, as transformers recognizes it."""
    return isinstance(kind, str) and "dynamic" in kind


def length_switch(config: Mapping[str, Any]) -> LengthSwitch | None:
    """Where a `longrope` or `dynamic` model changes its frequencies, from a `language_config`; None for others."""
    declared, found = _declared(config), []
    for one, _ in _rotary(config):
        if is_dynamic(kind := _kind(one)):
            found.append(declared)
        elif kind in ("longrope", "su") or (kind == "yarn" and config.get("model_type") in LIKE_PHI3):
            found.append(_size(config.get(ORIGINAL)) or _size(one.get(ORIGINAL)) or declared)
    lengths = [length for length in found if length is not None]
    return LengthSwitch(min(lengths), config.get("model_type") in LIKE_PHI3) if lengths else None


def _declared(config: Mapping[str, Any]) -> int | None:
    order = (OWN_LENGTH, *LENGTHS) if str(config.get("model_type")).startswith("cohere") else LENGTHS
    return next((length for name in order if (length := _size(config.get(name)))), None)


def _rotary(config: Mapping[str, Any]) -> list[tuple[Mapping[str, Any], bool]]:
    """The parameters of the rotary embedding, and whether they are those of all layers, or one entry per layer type."""
    rope = config.get("rope_scaling") or config.get("rope_parameters")  # of both, transformers reads the first alone
    if not isinstance(rope, dict):
        return []
    nested = [one for one in rope.values() if isinstance(one, dict)]
    is_flat = not nested and "rope_local_base_freq" not in config  # Gemma 3, where it is that of some layers
    return [(one, is_flat) for one in nested or [rope]]


def _kind(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type") or rope.get("type"))


def _reach(rope: Mapping[str, Any], declared: int, is_flat: bool) -> float:
    """Tokens that a rotary embedding reaches; `llama3` and `longrope` declare the length that they reach."""
    kind, factor = _kind(rope), rope.get("factor")
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 1 < factor <= LONGEST:
        return declared
    if is_dynamic(kind):  # by definition a multiple of the declared length
        return declared * factor
    # Gemma 3 declares the length that `linear` reaches in some of its layers
    if kind == "yarn" or (kind in ("linear", "proportional") and is_flat):
        return (_size(rope.get(ORIGINAL)) or declared) * factor
    return declared


def _size(value: Any) -> int | None:
    """A length in a config; None if it is none."""
    return value if isinstance(value, int) and 0 < value <= LONGEST else None


def has_window(folder: Path) -> bool:
    """Whether a token of the model attends to the latest tokens only, in any layer, by a folder's `config.json`."""
    config = language_config(folder)
    if config.get("use_sliding_window") is False:
        config.pop("sliding_window", None)
    sizes = [value for name, value in config.items() if WINDOW.fullmatch(name) and not isinstance(value, bool)]
    return any(sizes)


SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
# fields of transformers' `GenerationConfig` that change a text, and their neutral value; None where there is none
GENERATION: Mapping[str, Any] = {
    **dict.fromkeys(SPECIAL_TOKENS),
    **dict.fromkeys(("max_new_tokens", "max_length", "stop_strings", "max_time", "top_h", "bad_words_ids")),
    **dict.fromkeys(("force_words_ids", "constraints", "forced_bos_token_id", "forced_eos_token_id")),
    **dict.fromkeys(("exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens")),
    **dict.fromkeys(("sequence_bias", "watermarking_config", "dola_layers")),
    **dict.fromkeys(("do_sample", "early_stopping", "remove_invalid_values", "renormalize_logits"), False),
    **dict.fromkeys(("token_healing",), False),
    **dict.fromkeys(("min_length", "min_new_tokens", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), 0),
    **dict.fromkeys(("min_p", "epsilon_cutoff", "eta_cutoff", "diversity_penalty", "penalty_alpha"), 0.0),
    **dict.fromkeys(("temperature", "top_p", "typical_p", "repetition_penalty"), 1.0),
    **dict.fromkeys(("encoder_repetition_penalty", "length_penalty", "guidance_scale"), 1.0),
    **dict.fromkeys(("num_beams", "num_beam_groups"), 1),
    "top_k": 50,
}


def generation_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `GENERATION` in a `config.json`, which count where a model has no `generation_config.json`.

    Those of its `text_config` count where the model itself sets none (`GenerationConfig.from_model_config`).
    """
    text = config.get("text_config")
    parts = (text if isinstance(text, Mapping) else {}, config)
    return {name: one for part in parts for name, one in part.items() if name in GENERATION and one is not None}


def generation_settings(config: Mapping[str, Any], generation: Mapping[str, Any] | None) -> dict[str, Any]:
    """How a model generates: by `generation_config.json`, or without it (None) by `config.json`, as in transformers.

    Special tokens that the first lacks may be in the second.
    """
    own = generation_fields(config)
    if generation is None:
        return own
    tokens = {name: own[name] for name in SPECIAL_TOKENS if name in own}
    return tokens | {name: value for name, value in generation.items() if value is not None}


def architecture(config: Mapping[str, Any]) -> str:
    """The class that a `config.json` names first; empty where it names none."""
    names = config.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
