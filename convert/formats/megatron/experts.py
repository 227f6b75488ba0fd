"""The arguments of a Megatron run, and the fields of `config.json` that its mixture of experts describes.

Formulas: Megatron core `transformer/moe/{moe_utils,router}.py` against transformers' modeling files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llmconv.convert.fields import Fields
from llmconv.errors import UnsupportedInput, short


@dataclass(frozen=True)
class Arguments(Fields):
    """The arguments of a run by name, objects as stubs."""

    where: str = "in the arguments of `{}`"
    hint: str = "the checkpoint was changed, or is not one of a language model"

    def unsupported(self, name: str) -> UnsupportedInput:
        return UnsupportedInput(
            f"`{self.source}` was trained with `{name}` {short(self.values.get(name))}, which is unsupported",
            hint="convert it with Megatron Bridge, which builds the model with Megatron's own code",
        )


# Losses that balance the load of experts; `sinkhorn` is none: it weights experts without normalizing
BALANCED = ("aux_loss", "seq_aux_loss", "global_aux_loss", "none")
LAYER_LIMIT = 4096


def softmax_experts(arguments: Arguments, model_type: str, *, shared: bool) -> dict[str, Any]:
    """Fields of a mixture of experts; Megatron normalizes the chosen weights unless it softmaxes before choosing."""
    count, inner = arguments.count("num_experts"), arguments.count("ffn_hidden_size")
    size = arguments.count("moe_ffn_hidden_size", default=inner)
    before = arguments.flag("moe_router_pre_softmax")
    chosen = arguments.count("moe_router_topk", default=2)
    _check_balance(arguments)
    if model_type == "mixtral":
        if before:
            raise arguments.unsupported("moe_router_pre_softmax")
        if dense_layers(arguments):
            raise arguments.unsupported("moe_layer_freq")
        return {"intermediate_size": size, "num_local_experts": count, "num_experts_per_tok": chosen}
    config = {
        "moe_intermediate_size": size,
        "num_experts": count,
        "num_experts_per_tok": chosen,
        "norm_topk_prob": not before,
        "decoder_sparse_step": 1,
        "mlp_only_layers": dense_layers(arguments),
    }
    if shared:
        if not arguments.flag("moe_shared_expert_gate"):
            raise arguments.unsupported("moe_shared_expert_gate")
        config["shared_expert_intermediate_size"] = arguments.count("moe_shared_expert_intermediate_size")
    return config


def _check_balance(arguments: Arguments) -> None:
    balanced = arguments.values.get("moe_router_load_balancing_type")
    kinds = balanced if isinstance(balanced, list | tuple) else [balanced]
    if balanced is not None and not all(kind in BALANCED for kind in kinds):
        raise arguments.unsupported("moe_router_load_balancing_type")


def has_sigmoid(arguments: Arguments) -> bool:
    """Whether the router's scores are sigmoids, each expert's by itself."""
    return arguments.values.get("moe_router_score_function") == "sigmoid"


def grouped_experts(arguments: Arguments) -> dict[str, Any]:
    """Fields of a mixture as in DeepSeek and GLM-4.5; UnsupportedInput for what its router does otherwise.

    Megatron chooses groups of experts by the sum of their `moe_router_topk // moe_router_group_topk` highest scores;
    transformers by that of two, or with a softmax (DeepSeek-V2) by the highest, and without normalizing.
    """
    inner, sigmoid = arguments.count("ffn_hidden_size"), has_sigmoid(arguments)
    size, chosen = arguments.count("moe_ffn_hidden_size", default=inner), arguments.count("moe_router_topk", default=2)
    shared = arguments.count("moe_shared_expert_intermediate_size")
    groups, best = (arguments.count(name, default=1) for name in ("moe_router_num_groups", "moe_router_group_topk"))
    dense, experts = dense_layers(arguments), arguments.count("num_experts")
    _check_balance(arguments)
    for name, differs in {
        "moe_router_num_groups": experts % groups != 0 or experts // groups < 2,
        "moe_router_group_topk": groups > 1 and chosen // best != (2 if sigmoid else 1),
        "moe_router_pre_softmax": not sigmoid and not arguments.flag("moe_router_pre_softmax"),
        "moe_shared_expert_intermediate_size": shared % size != 0,
        "moe_shared_expert_gate": arguments.flag("moe_shared_expert_gate"),
        "moe_layer_freq": dense != list(range(len(dense))),
    }.items():
        if differs:
            raise arguments.unsupported(name)
    return {
        "moe_intermediate_size": size,
        "n_routed_experts": experts,
        "n_shared_experts": shared // size,
        "num_experts_per_tok": chosen,
        "first_k_dense_replace": len(dense),
        "n_group": groups,
        "topk_group": best if groups > 1 else 1,
        "norm_topk_prob": sigmoid and chosen > 1,
        "routed_scaling_factor": arguments.number("moe_router_topk_scaling_factor", default=1),
        **({} if sigmoid else {"topk_method": "group_limited_greedy" if groups > 1 else "greedy"}),
    }


def dense_layers(arguments: Arguments) -> list[int]:
    """The layers without experts, by `moe_layer_freq`: every n-th layer has them, or those with a 1 in a list."""
    layers, frequency = arguments.count("num_layers"), arguments.values.get("moe_layer_freq", 1)
    if not arguments.values.get("num_experts") or frequency is None:
        return []
    if layers > LAYER_LIMIT:
        raise arguments.invalid("num_layers", layers, f"at most {LAYER_LIMIT}")
    if type(frequency) is int and frequency > 0:
        return [layer for layer in range(layers) if layer % frequency]
    if not isinstance(frequency, list) or len(frequency) != layers or any(one not in (0, 1) for one in frequency):
        raise arguments.invalid("moe_layer_freq", frequency, "a number, or one for each layer")
    return [layer for layer, has_experts in enumerate(frequency) if not has_experts]
