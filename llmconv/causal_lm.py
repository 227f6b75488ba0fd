"""Checks that a `config.json` describes a causal language model, the only kind that llmconv's commands run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from llmconv.checkpoint import read_json
from llmconv.errors import MalformedInput, UnsupportedInput
from llmconv.files.paths import kind_of

OTHER_HEADS = (
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForMultipleChoice",
    "ForMaskedLM",
    "ForPreTraining",
    "ForNextSentencePrediction",
    "ForImageClassification",
    "ForAudioClassification",
    "ForSpeechSeq2Seq",
    "ForCTC",
    "ForReward",
    "RewardModel",
    "EncoderModel",
    "ForSequenceEmbedding",
)
"""Suffixes of transformers' classes whose heads do not predict the next token."""

CAUSAL = ("ForCausalLM", "LMHeadModel", "DoubleHeadsModel", "ForConditionalGeneration", "WithLMHead")
ENCODERS = frozenset(
    (
        "bert",
        "bert-generation",
        "big_bird",
        "camembert",
        "data2vec-text",
        "electra",
        "ernie",
        "megatron-bert",
        "reformer",
        "rembert",
        "roberta",
        "roberta-prelayernorm",
        "roc_bert",
        "roformer",
        "xlm-roberta",
        "xlm-roberta-xl",
        "xmod",
    )
)
"""Types whose class for causal language models attends to later tokens, too, unless `is_decoder` is set."""

ENCODER_DECODERS = {"t5", "mt5", "umt5", "longt5", "switch_transformers", "t5gemma", "led", "m2m_100", "whisper"}
"""Encoder-decoders without a causal language model in transformers."""


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


SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
"""Fields of almost every config that are positive integers, or lists of one per layer."""


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
    if names and not any(_is_causal(name) for name in names):
        task = next((task for task, fits in OTHER_TASKS.items() if any(map(fits, names))), "")
        raise UnsupportedInput(
            f"`{source}` is not a causal language model{shown}",
            hint=f"for a decoder `llmconv export MODEL --task {task}`; `optimum-cli export onnx` exports encoders"
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


def _is_bare(name: str) -> bool:
    """Whether a class is a model without a head."""
    return name.endswith("Model") and not name.endswith(OTHER_HEADS)


def _classifies(name: str) -> bool:
    """Whether a class has a head for classes of texts."""
    return name.endswith("ForSequenceClassification")


OTHER_TASKS: dict[str, Callable[[str], bool]] = {"embed": _is_bare, "classify": _classifies}
"""Tasks of models without a language-modeling head, by the class in `architectures`."""


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


def _is_causal(name: str) -> bool:
    """Whether a class may predict the next token; unknown classes may."""
    if name.endswith(OTHER_HEADS):
        return False
    return any(part in name for part in CAUSAL) or not name.endswith("Model")


def require_causal_folder(folder: Path, task: str = "generate") -> None:
    """Like `require_task`, for the `config.json` of a folder, if it exists."""
    if (folder / "config.json").is_file():
        require_task(read_json(folder / "config.json"), folder, task)
