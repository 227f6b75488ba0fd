"""LoraConfig: the fields of a PEFT `adapter_config.json` that affect the merged weight; others are refused."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from llmconv.convert.fields import Fields
from llmconv.errors import MalformedInput, UnsupportedInput, UsageProblem, short
from llmconv.timed_patterns import SPECIAL, MatchTime, PatternProblem, compiled, finds

FORMULA = "its update is not W + s·B·A; merge it with PEFT's `merge_and_unload` and `save_pretrained`"

REFUSED: dict[str, str] = {  # unsupported config field to the way out: the merged weight would not be W + s·B·A
    "alora_invocation_tokens": "the update depends on the prompt, so no merged model equals it; serve the adapter",
    "arrow_config": "the update depends on the input, so no merged model equals it; serve the adapter",
    "use_qalora": "the update works on groups of inputs; " + FORMULA,
    "kasa_config": "the base is truncated by an SVD first; " + FORMULA,
    "megatron_config": "tensor-parallel adapters are saved per rank; gather and save the adapter as plain PEFT",
}

# Values of `init_lora_weights` for which training changes the base, so that A and B do not fit the original one
CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
# Values of `init_lora_weights` for which training keeps the base
SAME_BASE = ("gaussian", "orthogonal", "eva", "mica", "true", "false")
QUANTIZED_BASE = "loftq"  # the value for which the base differs from the original by more than the initial adapter
NO_INITIAL = (
    "give the adapter as it was before training with `--initial-adapter`, or save the trained one with PEFT's "
    "`path_initial_model_for_weight_conversion`; if BASE is the base as training changed it, set "
    "`init_lora_weights` to true in `adapter_config.json`"
)
NO_QUANTIZED = (
    "merge into the base that training saved (its weights are the quantized ones), with `init_lora_weights` set to "
    "true in `adapter_config.json`"
)

KNOWN = {  # fields that are read, or irrelevant to the merged weight
    *("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias", "lora_bias", "modules_to_save"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "ensure_weight_tying"),
    *("fan_in_fan_out", "init_lora_weights", "lora_dropout", "inference_mode", "peft_type", "task_type"),
    *("auto_mapping", "base_model_name_or_path", "revision", "peft_version", "megatron_core", "runtime_config"),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "velora_config", "monteclora_config"),
    *("qalora_group_size", "use_dora", "layer_replication", "target_parameters", "trainable_token_indices"),
    *("use_bdlora", "lora_B_layout", "unsloth_fused_expert_lora", "moe_rank_scaling", "enable_lora", "merge_weights"),
}
B_LAYOUTS = {"rank_major": False, "grouped_by_expert": True}
"""`fused_by_unsloth` by the value of Unsloth's `lora_B_layout` (unsloth-zoo `temporary_patches/moe_utils.py`)."""


@dataclass(frozen=True)
class BlockDiagonal:
    """BD-LoRA (PEFT `BdLoraConfig`): a factor is block-diagonal, and only its `count` (`nblocks`) blocks are stored.

    A factor is stored as blocks if the last component of the module's path contains one of the strings in `a` or `b`.
    """

    count: int
    a: tuple[str, ...]
    b: tuple[str, ...]


@dataclass(frozen=True)
class LoraConfig:
    """The fields of an adapter's config that affect the merged weight."""

    rank: int | None  # `r`, or None if the file does not contain it (the tensors do)
    alpha: float
    use_rslora: bool  # scale by alpha/√r instead of alpha/r
    rank_pattern: Mapping[str, int]  # regular expression of module paths to rank
    alpha_pattern: Mapping[str, float]  # regular expression of module paths to alpha
    modules_to_save: tuple[str, ...]  # modules of which the file contains the whole weights
    bias: str  # `none`, `all` or `lora_only`: which biases the file replaces
    warnings: tuple[str, ...]  # one line each
    dora: bool = False  # `use_dora`: outputs are scaled to trained magnitudes
    # `layer_replication`: ranges of the base's layers, end excluded, that make up the adapted model
    layers: tuple[tuple[int, int], ...] = ()
    parameters: tuple[str, ...] = ()  # `target_parameters`: adapted parameters, mostly of fused experts
    # `trainable_token_indices`: module to the ids of its trained rows; `""` is the input embedding
    tokens: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    blocks: BlockDiagonal | None = None  # `use_bdlora`, or None
    # `enable_lora` of PEFT before 0.3: which of the matrices that a weight joins by rows have factors of their own
    enabled: tuple[bool, ...] = ()
    # whether the columns of an expert's B are contiguous, by the last component of the parameter; `""` is the default
    fused_by_unsloth: Mapping[str, bool] = field(default_factory=dict)
    scales_expert_ranks: bool = False  # NeMo AutoModel's `moe_rank_scaling`: experts have a smaller rank than `r`
    base_class: str = ""  # class of the model it was trained on (`auto_mapping.base_model_class`), or empty
    task: str = ""  # `task_type`, such as `CAUSAL_LM` or `SEQ_CLS`; empty if the file does not contain it
    peft_version: tuple[int, int] | None = None  # first two numbers of the version that wrote the file, or None
    # shared by all patterns of the adapter
    match_time: MatchTime = field(default_factory=MatchTime, compare=False, repr=False)

    def scale(self, module: str, rank: int) -> float:
        """s of W + s·B·A (PEFT `update_layer`: alpha/r, or alpha/√r); MalformedInput for another rank in the config."""
        expected = self.rank_pattern.get(matching_key(self.rank_pattern, module, self.match_time), self.rank)
        if expected not in (None, rank) and not (self.scales_expert_ranks and ".experts." in f"{module}."):
            raise MalformedInput(
                f"rank mismatch for `{module}`: the adapter config has rank {expected}, its tensors have rank {rank}",
                hint="config and tensors belong to different adapters; copy the adapter again",
            )
        alpha = self.alpha_pattern.get(matching_key(self.alpha_pattern, module, self.match_time), self.alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


@dataclass(frozen=True)
class AdapterFields(Fields):
    """The fields of an adapter's config, with PEFT's defaults where absent or null."""

    where: str = "in the adapter config"
    hint: str = "repair `adapter_config.json`, or copy the adapter again"
    match_time: MatchTime = field(default_factory=MatchTime, compare=False, repr=False)

    def of_module(self, pattern: str, module: str, default: float) -> float:
        """The number above 0 for a module, from the field `pattern` with regular expressions of module paths."""
        values = self.patterns(pattern)
        found = {pattern: values.get(matching_key(values, module, self.match_time), default)}
        return replace(self, values=found).number(pattern)

    def patterns(self, name: str) -> dict[str, Any]:
        """A table by regular expressions, few enough to be tried quickly on every module."""
        special = [pattern for pattern in self.table(name) if SPECIAL.search(pattern)]
        if (total := sum(map(len, special))) > TOTAL_LIMIT:
            raise refused(special[0], f"and {len(special) - 1} more, of {total} characters together")
        return self.table(name)


def matching_key(pattern: Mapping[str, Any], module: str, time: MatchTime) -> str:
    """The first key of `pattern` that matches a module (PEFT `get_pattern_key`), or `""`; errors as in `matches`."""
    return next((key for key in pattern if matches(key, module, time)), "")


def parse_config(fields: Mapping[str, Any], alpha: float | None = None, *, initial: bool = False) -> LoraConfig:
    """The config of a PEFT LoRA adapter from the content of `adapter_config.json`.

    `alpha` is `lora_alpha` if the file lacks it; with `initial` training may have changed the base. UnsupportedInput:
    the merged weight is not W + s·B·A; MalformedInput: an invalid value, an alpha of 0; UsageProblem: `alpha`
    contradicts the file.
    """
    _require_plain_lora(fields, initial)
    own = fields.get("lora_alpha")
    if alpha is not None and own is not None and alpha != own:
        raise UsageProblem(
            f"`--alpha {alpha:g}` contradicts the adapter, which has `lora_alpha` {own}",
            hint="leave out `--alpha`; to merge more or less of an adapter give `--weight`",
        )
    unknown = sorted(name for name, value in fields.items() if value and name not in KNOWN)
    warnings = [f"the adapter config sets `{name}`, an unknown field, which is ignored" for name in unknown]
    if own is None and alpha is None:
        warnings.append("the adapter config has no `lora_alpha`; PEFT's default 8 is used")
    rank, known = fields.get("r"), AdapterFields(fields)
    training, stated = known.table("auto_mapping"), fields.get("peft_version")
    version = re.match(r"(\d+)\.(\d+)", stated) if isinstance(stated, str) else None
    layers, tokens = fields.get("layer_replication") or [], fields.get("trainable_token_indices") or {}
    if not isinstance(layers, list) or not all(_are_counts(item, 2) and item[0] < item[1] for item in layers):
        raise known.invalid("layer_replication", layers)
    by_module = tokens if isinstance(tokens, dict) else {"": tokens}
    if not all(_are_counts(ids) and len(set(ids)) == len(ids) for ids in by_module.values()):
        raise known.invalid("trainable_token_indices", tokens)
    if (bias := fields.get("bias") or "none") not in ("none", "all", "lora_only"):
        raise known.invalid("bias", bias)
    enabled = fields.get("enable_lora") or []
    if (
        not isinstance(enabled, list)
        or not all(isinstance(one, bool) for one in enabled)
        or enabled
        and not any(enabled)
    ):
        raise known.invalid("enable_lora", enabled)
    pairs = sum(enabled) or 1  # as one pair of their ranks together
    return LoraConfig(
        rank=None if rank is None else int(_number("r", rank)) * pairs,
        alpha=_number("lora_alpha", next(value for value in (own, alpha, 8) if value is not None)) * pairs,
        use_rslora=known.flag("use_rslora"),
        rank_pattern={key: int(rank) for key, rank in _by_pattern(known, "rank_pattern").items()},
        alpha_pattern=_by_pattern(known, "alpha_pattern"),
        modules_to_save=known.names("modules_to_save"),
        bias=bias,
        warnings=tuple(warnings),
        dora=known.flag("use_dora"),
        layers=tuple((start, stop) for start, stop in layers),
        parameters=known.names("target_parameters"),
        tokens={module: tuple(ids) for module, ids in by_module.items()},
        blocks=_blocks(known.table("use_bdlora")),
        enabled=tuple(enabled),
        fused_by_unsloth=_layouts(known, default=bool(training.get("unsloth_fixed"))),
        scales_expert_ranks=known.flag("moe_rank_scaling"),
        base_class=name if isinstance(name := training.get("base_model_class"), str) and name.isidentifier() else "",
        task=task_of(fields),
        peft_version=(int(version[1]), int(version[2])) if version else None,
    )


def _layouts(known: AdapterFields, *, default: bool) -> dict[str, bool]:
    """`LoraConfig.fused_by_unsloth`: what a file of Unsloth states since September 2026; `default` before."""
    named = AdapterFields(known.table("unsloth_fused_expert_lora")).table("parameters")
    stated = {
        name: one["lora_B_layout"] for name, one in named.items() if isinstance(one, dict) and "lora_B_layout" in one
    }
    if not stated and (whole := known.word("lora_B_layout")):
        stated = {"": whole}
    if odd := next((one for one in stated.values() if not isinstance(one, str) or one not in B_LAYOUTS), None):
        raise UnsupportedInput(
            f"the adapter has the unknown `lora_B_layout` {short(odd)!r}",
            hint="merge it with Unsloth's `save_pretrained_merged`",
        )
    return {"": default} | {name: B_LAYOUTS[one] for name, one in stated.items()}


def task_of(fields: Mapping[str, Any]) -> str:
    return task if isinstance(task := fields.get("task_type"), str) else ""


def _require_plain_lora(fields: Mapping[str, Any], initial: bool) -> None:
    kind = fields.get("peft_type", "LORA" if {"r", "lora_alpha"} <= fields.keys() else None)  # Tinker's has these alone
    if kind != "LORA":
        raise UnsupportedInput(f"the adapter has `peft_type` {kind!r}, not 'LORA'", hint=FORMULA)
    for name, way_out in REFUSED.items():
        if fields.get(name):
            raise UnsupportedInput(f"the adapter sets `{name}`", hint=way_out)
    init = fields.get("init_lora_weights")
    quantized = isinstance(init, str) and init.lower().startswith(QUANTIZED_BASE)
    if isinstance(init, str) and init.lower().startswith(CHANGED_BASE) and (quantized or not initial):
        raise UnsupportedInput(
            f"the adapter has `init_lora_weights` {init!r}, which changed the base it was trained on",
            hint=NO_QUANTIZED if quantized else NO_INITIAL,
        )
    if init is not None and not isinstance(init, bool | str):
        raise AdapterFields(fields).invalid("init_lora_weights", init)
    if isinstance(init, str) and not init.lower().startswith((*SAME_BASE, *CHANGED_BASE)):
        raise UnsupportedInput(
            f"the adapter has the unknown `init_lora_weights` {init!r}, which may have changed the base",
            hint="if training did not change the base, set `init_lora_weights` to true in `adapter_config.json`",
        )


def _by_pattern(known: AdapterFields, name: str) -> dict[str, float]:
    return {pattern: _number(name, value) for pattern, value in known.patterns(name).items()}


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
        raise MalformedInput(
            f"the adapter config has {value!r} for `{name}`, which would merge nothing",
            hint="ask the adapter's author for the value it was trained with; some trainers wrote 0 by mistake",
        )
    return value


def _blocks(own: Mapping[str, Any]) -> BlockDiagonal | None:
    fields, count = AdapterFields(own), int(_number("nblocks", own.get("nblocks", 1)))
    return BlockDiagonal(count, *map(fields.names, ("target_modules_bd_a", "target_modules_bd_b"))) if own else None


def _are_counts(value: Any, length: int | None = None) -> bool:
    if not isinstance(value, list) or length not in (None, len(value)):
        return False
    return all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in value)


TOTAL_LIMIT = 4000  # characters of all patterns of an adapter, plain names not counted
FORM = r"(.*\.)?({})$"  # PEFT's expression for a pattern


def matches(pattern: str, module: str, time: MatchTime | None = None) -> bool:
    r"""Whether `(.*\.)?(pattern)$` matches a module's path (PEFT `get_pattern_key`); MalformedInput: invalid, slow."""
    try:
        return finds(compiled(pattern, FORM, costly=False), module, time)
    except PatternProblem as problem:
        raise refused(pattern, str(problem)) from problem


def refused(pattern: str, problem: str) -> MalformedInput:
    return MalformedInput(
        f"the adapter config has the regular expression {pattern[:80]!r}, {problem}",
        hint="repair `rank_pattern` or `alpha_pattern` in `adapter_config.json`",
    )
