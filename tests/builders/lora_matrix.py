"""Families of models, kinds of adapters, and what PEFT makes of each pair: its merge in float64, and the logits.

PEFT's merge of an adapter changes the embedding too where it changes a tied head, for the two are one tensor, and it
adds to replicated layers twice; there only the logits of the model as it was trained are the judge.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from safetensors.torch import load_file

from tests.builders.tuned_models import State, in_float64

ROTARY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FUSED = {key: value for key, value in ROTARY.items() if key != "num_key_value_heads"}
BLOOM = {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4}
FALCON = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "bias": True}
GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "eos_token_id": 2}
OPT = {"ffn_dim": 48, "word_embed_proj_dim": 32}
EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4}
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION |= {"image_size": 28, "patch_size": 14}
CLIP = VISION | {"model_type": "clip_vision_model"}
ROPE = {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}
QWEN_VISION = {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "patch_size": 14}
IDS = torch.arange(8, 24)[None]


@dataclass(frozen=True)
class Family:
    """A model type, tiny, and what adapters call its parts.

    Attributes:
        model_type: of transformers.
        config: its fields.
        attention: modules of the attention.
        mlp: a module behind it.
        embedding: the input embedding.
        bias: whether the modules of the attention have biases.
        tied: whether head and embedding are one tensor.
        experts: tensors with all experts in one.
        multimodal: whether it sees images too.
        norm: a module that is saved whole.
    """

    model_type: str
    config: dict[str, Any] = field(default_factory=lambda: ROTARY)
    attention: tuple[str, ...] = ("q_proj", "v_proj")
    mlp: str = "down_proj"
    embedding: str = "embed_tokens"
    bias: bool = False
    tied: bool = False
    experts: tuple[str, ...] = ()
    multimodal: bool = False
    norm: str = "norm"

    def load(self, folder: Path | None, dtype: torch.dtype) -> Any:
        """The model in a folder, or a new one with random weights."""
        kind = transformers.AutoModelForImageTextToText if self.multimodal else transformers.AutoModelForCausalLM
        eager = {"experts_implementation": "eager"} if self.experts else {}  # the others have no float64
        if folder:
            return kind.from_pretrained(folder, dtype=dtype, **eager)
        torch.manual_seed(0)
        model = kind.from_config(transformers.AutoConfig.for_model(self.model_type, **self.config), dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
        return model.to(dtype)


PACKED = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
BIG: dict[str, Any] = {"attention": ("query_key_value",), "mlp": "dense_4h_to_h", "bias": True}
FAMILIES = {
    "llama": Family("llama", ROTARY | {"tie_word_embeddings": False}),
    "llama, tied": Family("llama", ROTARY | {"tie_word_embeddings": True}, tied=True),
    "qwen2": Family("qwen2", ROTARY | {"tie_word_embeddings": True}, bias=True, tied=True),
    "gpt2": Family("gpt2", GPT2, ("c_attn",), "c_fc", "wte", bias=True, tied=True, norm="ln_f"),
    "mixtral": Family("mixtral", ROTARY | EXPERTS, mlp="o_proj", experts=PACKED),
    "qwen3_moe": Family(
        "qwen3_moe",
        ROTARY | EXPERTS | {"num_experts": 4, "moe_intermediate_size": 24, "head_dim": 8},
        mlp="o_proj",
        experts=PACKED,
    ),
    "gpt_oss": Family("gpt_oss", ROTARY | EXPERTS | {"head_dim": 8}, mlp="o_proj", bias=True, experts=PACKED),
    "gemma2": Family("gemma2", ROTARY | {"head_dim": 8}, tied=True),
    "gpt_neox": Family("gpt_neox", FUSED, embedding="embed_in", norm="final_layer_norm", **BIG),
    "bloom": Family("bloom", BLOOM, embedding="word_embeddings", tied=True, norm="ln_f", **BIG),
    "phi3": Family("phi3", ROTARY, ("qkv_proj",), "gate_up_proj"),
    "falcon": Family("falcon", FALCON, embedding="word_embeddings", tied=True, norm="ln_f", **BIG),
    "opt": Family("opt", FUSED | OPT, mlp="fc1", bias=True, tied=True, norm="final_layer_norm"),
    "gemma3": Family(
        "gemma3",
        {"text_config": ROTARY | {"head_dim": 8}, "vision_config": VISION, "mm_tokens_per_image": 4},
        tied=True,
        multimodal=True,
    ),
    "qwen2_vl": Family(
        "qwen2_vl", {"text_config": ROTARY | ROPE, "vision_config": QWEN_VISION, "image_token_id": 5}, multimodal=True
    ),
    "llava": Family("llava", {"text_config": ROTARY | {"model_type": "llama"}, "vision_config": CLIP}, multimodal=True),
}

Make = Callable[[Family], peft.PeftConfig]


def lora(targets: Callable[[Family], Any] | str | None = None, **fields: Any) -> Make:
    """Makes a LoraConfig; fields that are functions are of the family."""

    def make(family: Family) -> peft.PeftConfig:
        own = {key: value(family) if callable(value) else value for key, value in fields.items()}
        where = targets(family) if callable(targets) else targets
        own = {"r": 4, "lora_alpha": 6, "init_lora_weights": False, **own}
        return peft.LoraConfig(target_modules=list(family.attention) if where is None else where, **own)

    return make


def tuner(kind: type[peft.PeftConfig], **fields: Any) -> Make:
    """Makes the config of another kind, on the attention and a module behind it."""
    return lambda family: kind(target_modules=[*family.attention, family.mlp], **fields)


def embedding(family: Family) -> list[str]:
    """A list with it."""
    return [family.embedding]


def both(family: Family) -> list[str]:
    """Embedding and head."""
    return [family.embedding, "lm_head"]


HEAD = ["lm_head"]
LORA: dict[str, Make] = {
    "plain": lora(),
    "all": lora("all-linear"),
    "rslora": lora("all-linear", use_rslora=True),
    "dora": lora(lambda family: [*family.attention, family.mlp, family.embedding], use_dora=True, use_rslora=True),
    "bias of b": lora(lora_bias=True),
    "all biases": lora(bias="all"),
    "lora biases": lora(bias="lora_only"),
    "saved head": lora(modules_to_save=HEAD),
    "saved embedding": lora(modules_to_save=embedding),
    "saved both": lora(modules_to_save=both),
    "saved tied": lora(modules_to_save=embedding, ensure_weight_tying=True),
    "saved norm": lora(modules_to_save=lambda family: [family.norm]),
    "tokens": lora(trainable_token_indices=[3, 60, 7]),
    "tokens of modules": lora(trainable_token_indices=lambda family: {family.embedding: [9, 0], "lm_head": [9, 0]}),
    "tokens and head": lora(lambda _: HEAD, trainable_token_indices=[1, 5]),
    "embedding": lora(embedding),
    "embedding, tied": lora(embedding, ensure_weight_tying=True),
    "head": lora(lambda family: [*family.attention, "lm_head"]),
    "head, tied": lora(lambda family: [*family.attention, "lm_head"], ensure_weight_tying=True),
    "head, dora": lora(lambda _: HEAD, use_dora=True),
    "embedding and head": lora(both),
    "one layer": lora(layers_to_transform=[1]),
    "expression": lora(lambda family: rf".*\.({family.attention[0]}|{family.mlp})"),
    "all but one": lora("all-linear", exclude_modules=lambda family: [family.mlp]),
    "patterns": lora(
        lambda family: [*family.attention, family.mlp],
        rank_pattern=lambda family: {r"[hlayers]+\.1\..*": 3, family.attention[0]: 2},
        alpha_pattern=lambda family: {r".*\.0\..*": 5, family.mlp: 1},
    ),
    "a weight as parameter": lora(lambda _: [], target_parameters=lambda family: [f"{family.attention[0]}.weight"]),
    "experts": lora(target_parameters=lambda family: list(family.experts)),
    "experts, patterns": lora(
        target_parameters=lambda family: list(family.experts),
        use_rslora=True,
        rank_pattern=lambda family: {family.experts[0]: 2},
        alpha_pattern=lambda family: {family.experts[1]: 3},
    ),
    "one part of experts": lora(lambda _: [], target_parameters=lambda family: list(family.experts[1:])),
    "replicated": lora(layer_replication=[[0, 2], [0, 1], [1, 2]]),
}
RESIZED: dict[str, Make] = {
    "resized, both": lora(both),
    "resized, embedding": lora(embedding),
    "resized, saved both": lora(modules_to_save=both),
    "resized, saved embedding": lora(modules_to_save=embedding),
    "resized, tokens": lora(trainable_token_indices=[64, 66]),
    "resized, untouched": lora(),
}
TUNERS: dict[str, Make] = {
    "adalora": tuner(peft.AdaLoraConfig, init_r=6, target_r=3, total_step=10, lora_alpha=8),
    "loha": tuner(peft.LoHaConfig, r=3, alpha=5, init_weights=False),
    "loha, saved head": tuner(peft.LoHaConfig, r=3, alpha=5, init_weights=False, modules_to_save=HEAD),
    "lokr": tuner(peft.LoKrConfig, r=2, alpha=5, decompose_both=True, decompose_factor=8, init_weights=False),
    "ia3": lambda family: peft.IA3Config(
        target_modules=[*family.attention, family.mlp], feedforward_modules=[family.mlp], init_ia3_weights=False
    ),
    "vera": lambda family: peft.VeraConfig(target_modules=list(family.attention), r=8, init_weights=False),
    "oft": tuner(peft.OFTConfig, oft_block_size=8, init_weights=False, use_cayley_neumann=False),
    "boft": tuner(peft.BOFTConfig, boft_block_size=4, boft_n_butterfly_factor=2, init_weights=False),
    "fourierft": tuner(peft.FourierFTConfig, n_frequency=20, scaling=3.0, init_weights=False),
    "hra": tuner(peft.HRAConfig, r=4, apply_GS=True, init_weights=False),
    "ln tuning": lambda family: peft.LNTuningConfig(target_modules=[family.norm]),
}
KINDS = LORA | RESIZED | TUNERS
ROTARY_ONLY = ("llama", "llama, tied")
LINEAR_ONLY = ("loha", "loha, saved head", "lokr", "oft", "boft", "hra")


def makes_sense(name: str, kind: str) -> bool:
    """Whether PEFT can train the kind on the family, and save all that a merge needs."""
    family = FAMILIES[name]
    if kind.startswith(("experts", "one part")):
        return bool(family.experts)
    if kind == "replicated":
        return name in ROTARY_ONLY
    if kind == "bias of b":
        return family.bias
    if kind in LINEAR_ONLY:
        return name != "gpt2"
    if kind in ("resized, embedding", "resized, saved embedding"):  # the other half is not saved
        return not family.multimodal and (family.tied or kind.endswith("saved embedding"))
    return not (family.multimodal and kind in ("resized, tokens", "resized, untouched"))


@dataclass(frozen=True)
class Trained:
    """A trained pair, and its judges.

    Attributes:
        base: folder of the base.
        adapter: folder of the adapter.
        exact: PEFT's merge in float64, in names of files; without what PEFT gets wrong.
        logits: of the model as it was trained, in float64.
    """

    base: Path
    adapter: Path
    exact: State
    logits: torch.Tensor


def train(name: str, kind: str, folder: Path, dtype: torch.dtype) -> Trained:
    """Trains (adds seeded noise to all that is trained) and merges with PEFT."""
    family = FAMILIES[name]
    base, adapter = folder / "base", folder / "adapter"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        family.load(None, dtype).save_pretrained(base)
        model = peft.get_peft_model(_sized(family.load(base, dtype), kind), KINDS[kind](family))
        torch.manual_seed(7)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.1 * torch.randn_like(parameter))
        model.save_pretrained(adapter)
        return Trained(base, adapter, _merged(family, kind, base, adapter), logits_of(model.double()))


def _sized(model: Any, kind: str) -> Any:
    if kind.startswith("resized"):
        model.resize_token_embeddings(68, mean_resizing=False)
    return model


def _merged(family: Family, kind: str, base: Path, adapter: Path) -> State:
    model = _sized(family.load(base, torch.float64), kind)
    adapted = peft.PeftModel.from_pretrained(model, adapter, autocast_adapter_dtype=False).double()
    with in_float64():
        merged = adapted.merge_and_unload()
    if kind == "replicated" or (kind == "tokens and head" and family.tied):  # PEFT cannot save these
        return {}
    merged.save_pretrained(adapter.parent / "exact")
    exact = load_file(adapter.parent / "exact" / "model.safetensors")
    one = (family.embedding, "lm_head") if family.tied else ()
    return {name: value for name, value in exact.items() if not any(part in name for part in one)}


def logits_of(model: Any) -> torch.Tensor:
    """Of some tokens."""
    with torch.no_grad(), in_float64():
        logits: torch.Tensor = model.eval()(input_ids=IDS).logits
    return logits
