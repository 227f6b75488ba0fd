"""NeMo's configuration as Megatron's arguments: `model_config.yaml` of NeMo 1, `context/model.yaml` of NeMo 2.

Sources: NeMo 1.20 to 2.4, `megatron_gpt_model.py` and `megatron_base_model.py` (`build_transformer_config`),
`llm/gpt/model/base.py`; Megatron Bridge saves the same fields as NeMo 2 in `run_config.yaml`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmconv.convert.formats.megatron.arguments import OFF
from llmconv.convert.formats.megatron.config import INTERPOLATION, OWN_FACTOR
from llmconv.convert.formats.megatron.save_folder import NEMO2_CONTEXT, NEMO_CONFIG
from llmconv.convert.models.config_file import read_config_file
from llmconv.errors import MalformedInput, UnsupportedInput

NEMO2_FILE, BRIDGE_FILE = "model.yaml", "run_config.yaml"

RENAMED = {
    "bias": "add_bias_linear",
    "encoder_seq_length": "max_position_embeddings",
    "num_moe_experts": "num_experts",
    "qkv_bias": "add_qkv_bias",
    "rotary_percentage": "rotary_percent",
    "rope_scaling": "use_rope_scaling",
    "rope_scaling_factor": OWN_FACTOR,
    "scale_factor": OWN_FACTOR,
    "scale_positional_embedding": "use_rope_scaling",
    "seq_len_interpolation_factor": INTERPOLATION,
    "seq_length": "max_position_embeddings",
}
ONLY_VALUE: dict[str, tuple[Any, ...]] = {
    "apply_embedding_scaling": OFF,
    "attention_type": ("multihead", *OFF),
    "drop_layers": OFF,
    "headscale": OFF,
    "hyena": OFF,
    "mcore_customization_config": OFF,
    "megatron_legacy": OFF,
    "normalize_attention_scores": (None, True),
    "transformer_block_type": ("pre_ln", *OFF),
}
"""Settings of NeMo that change the model, and the values with which they do not."""

GATED = ("swiglu", "fast-swiglu")
SCALING = {"low_freq_factor": 1, "high_freq_factor": 4, "old_context_len": 8192}
"""Constants of Llama 3.1's frequencies, which NeMo 2 stores; Megatron core has no others."""

UNREAD = ("_", "activations_checkpoint", "bias_activation", "get_", "num_micro_batches", "transformer_engine")
"""First letters of settings that concern speed and memory alone."""

READ = ("activation", "activation_func", "share_embeddings_and_output_weights", *ONLY_VALUE)
SILU, GELU = ".silu", ".gelu"


def read_nemo(folder: Path) -> dict[str, Any]:
    """Megatron's arguments from the config in a folder of NeMo or Megatron Bridge; empty if there is none.

    Raises MalformedInput for another file, UnsupportedInput for a setting that no supported model has.
    """
    if (folder / NEMO_CONFIG).is_file():
        return _nemo1(read_config_file(folder / NEMO_CONFIG), folder.name)
    file = folder / NEMO2_CONTEXT / NEMO2_FILE
    if file.is_file():
        return _transformer_config(read_config_file(file).get("config"), file)
    if (folder / BRIDGE_FILE).is_file():
        return _transformer_config(read_config_file(folder / BRIDGE_FILE).get("model"), folder / BRIDGE_FILE)
    return {}


def _nemo1(fields: Mapping[str, Any], source: str) -> dict[str, Any]:
    inner = fields.get("model")
    config = inner if isinstance(inner, dict) and "num_layers" in inner else fields
    for name, allowed in ONLY_VALUE.items():
        if config.get(name) not in allowed:
            raise _unsupported(source, name, config[name])
    activation = config.get("activation", "gelu")
    if activation not in (*GATED, "gelu"):
        raise _unsupported(source, "activation", activation)
    norm = str(config.get("normalization", "layernorm")).lower()
    fused = config.get("bias_activation_fusion", True) is not False or bool(config.get("openai_gelu"))
    made = {
        "swiglu": activation in GATED,
        "bias_gelu_fusion": fused,
        "openai_gelu": False,
        "untie_embeddings_and_output_weights": config.get("share_embeddings_and_output_weights", True) is False,
        "normalization": "LayerNorm" if norm == "layernorm1p" else norm,
        "layernorm_zero_centered_gamma": norm == "layernorm1p" or bool(config.get("layernorm_zero_centered_gamma")),
    }
    kept = {name: value for name, value in config.items() if name != "max_position_embeddings"}
    return _renamed(kept) | made


def _transformer_config(config: Any, file: Path) -> dict[str, Any]:
    """The fields of a TransformerConfig, as NeMo 2 and Megatron Bridge write them."""
    if not isinstance(config, dict) or "num_layers" not in config:
        raise MalformedInput(f"`{file.name}` does not describe a language model", hint="copy the checkpoint again")
    target = config.get("activation_func")
    word = str(target.get("_target_", target) if isinstance(target, dict) else target)
    gated = config.get("gated_linear_unit") is True
    if not word.endswith(SILU if gated else GELU):
        raise _unsupported(file.name, "activation_func", word)
    made = {
        "swiglu": gated,
        "bias_gelu_fusion": config.get("bias_activation_fusion") is True,
        "untie_embeddings_and_output_weights": config.get("share_embeddings_and_output_weights", True) is False,
    }
    if "old_context_len" in config:
        if any(config.get(name) != value for name, value in SCALING.items()):
            raise _unsupported(file.name, "low_freq_factor, high_freq_factor or old_context_len", "of its own")
        made["use_rope_scaling"] = True
    return _renamed(config) | made


def _renamed(config: Mapping[str, Any]) -> dict[str, Any]:
    left = {name: value for name, value in config.items() if not name.startswith(UNREAD) and name not in READ}
    return {RENAMED.get(name, name): _plain(value) for name, value in left.items()}


def _plain(value: Any) -> Any:
    """A value of YAML; a tuple is written as a call. Other calls stay, so that one of an argument is refused."""
    if isinstance(value, dict) and value.get("_target_") == "builtins.tuple":
        inner = value.get("_args_")
        return tuple(inner[0]) if isinstance(inner, list) and inner and isinstance(inner[0], list) else value
    return value


def _unsupported(source: str, name: str, value: Any) -> UnsupportedInput:
    return UnsupportedInput(
        f"`{source}` declares `{name}` {str(value)[:40]}, which is unsupported",
        hint="convert it with NeMo's own exporter, which builds the model with its own code",
    )
