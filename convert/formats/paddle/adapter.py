"""PaddleNLP's LoRA adapters: `lora_config.json` next to `lora_model_state*.pdparams`.

Layout (paddlenlp `peft/lora/lora_model.py`, `lora_layers.py`): `<module>.lora_A` (in×r) and `<module>.lora_B` (r×out),
both the transpose of PEFT's, with trained biases and modules; ranks split them as they split the module.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmconv.checkpoint import read_json
from llmconv.convert.adapters.adapter import Adapter, Pair, check
from llmconv.convert.adapters.lora_config import LoraConfig, parse_config
from llmconv.convert.adapters.other_tools import AdapterFormat, padded_columns
from llmconv.convert.algebra import concat
from llmconv.convert.formats.paddle.config import number, to_config
from llmconv.convert.formats.paddle.names import FAMILIES, PaddleFamily, TensorRule, converted, numbered
from llmconv.convert.formats.paddle.read import open_rank_files
from llmconv.errors import InputRefused, MalformedInput, UnsupportedInput, listing
from llmconv.tensors import LazyTensor

CONFIG = "lora_config.json"
FILE = re.compile(r"lora_model_state(?:\.(?:tp(\d{2,3}))?_?(?:pp(\d{2,3}))?)?\.pdparams")

LAYER_LIMIT = 10_000  # more layers than any model has; tensors of further layers are unexpected keys
REFUSED: dict[str, str] = {  # fields with which the update is not W + s·A·B, and why
    "pissa": "its training changed the base, and the file does not contain the original",
    "loraga": "its training changed the base",
    "enable_lora_list": "the factors of its fused layers are shuffled by head",
    "use_mora": "MoRA's update is not a product of two factors",
    "lora_use_mixer": "there is a mixer between the two factors",
    "do_qat": "it was trained with fake quantization",
    "nola": "its factors are combinations of random ones",
}


def is_paddle_adapter(path: Path) -> bool:
    """Whether `path` is a folder with a PaddleNLP LoRA, or its weights file."""
    folder = path if path.is_dir() else path.parent
    return (folder / CONFIG).is_file() and (path.is_dir() or FILE.fullmatch(path.name) is not None)


def open_paddle_adapter(path: Path, alpha: float | None = None) -> Adapter:
    """Opens a PaddleNLP LoRA (folder or file) for the model that `to-hf` makes; `alpha`: if its config lacks it.

    Raises InputRefused for a missing file, MalformedInput for wrong keys or shapes, UnsupportedInput for other kinds or
    families.
    """
    folder = path if path.is_dir() else path.parent
    files = {
        _rank_and_stage(match): folder / match[0] for entry in folder.iterdir() if (match := FILE.fullmatch(entry.name))
    }
    if not files or not (folder / "config.json").is_file():
        absent = "config.json" if files else "lora_model_state.pdparams"
        raise InputRefused(
            f"the adapter `{folder.name}` has no `{absent}`",
            hint="copy the whole folder that PaddleNLP's `LoRAModel.save_pretrained` wrote",
        )
    fields, model = read_json(folder / CONFIG), read_json(folder / "config.json")
    ranks, settings = open_rank_files(folder, files, fields), to_config(model, folder.name, [])
    rules = _rules(FAMILIES[model["model_type"]], settings, ranks, folder.name)
    pairs, whole, joined = _converted(rules, ranks, folder.name)
    config, kind = _with_joined(_config(fields, alpha), joined), str(settings["model_type"])
    adapter = Adapter(folder, tuple(sorted(files.values())), folder / CONFIG, config, pairs, whole, model_type=kind)
    check(adapter)
    return adapter


def _rank_and_stage(match: re.Match[str]) -> tuple[int, int]:
    return int(match[1] or 0), int(match[2] or 0)


def _config(fields: Mapping[str, Any], alpha: float | None) -> LoraConfig:
    """Paddle's fields in PEFT's names; its `scaling` must equal the one computed from them."""
    for name, reason in REFUSED.items():
        if fields.get(name):
            raise UnsupportedInput(
                f"the adapter sets `{name}`: {reason}", hint="merge it with PaddleNLP's `merge_lora_params.py`"
            )
    bias = "all" if fields.get("trainable_bias") in ("all", "lora") else "none"
    config = parse_config(
        {
            "peft_type": "LORA",
            "r": fields.get("r"),
            "lora_alpha": fields.get("lora_alpha"),
            "use_rslora": fields.get("rslora"),
            "bias": bias,
        },
        alpha,
    )
    stated, rank = fields.get("scaling"), config.rank
    if isinstance(stated, int | float) and rank and not _is_close(stated, config.scale("", rank)):
        raise MalformedInput(
            f"the adapter declares `scaling` {str(stated)[:40]}, but `lora_alpha` and `r` result in "
            f"{config.scale('', rank):g}",
            hint=f"repair `{CONFIG}`; PaddleNLP computes `scaling` from the other two",
        )
    return config


def _is_close(stated: float, computed: float) -> bool:
    return abs(stated) <= sys.float_info.max and math.isclose(stated, computed, rel_tol=1e-6)


def _rules(
    family: PaddleFamily, settings: dict[str, Any], ranks: Sequence[Mapping[str, LazyTensor]], source: str
) -> list[TensorRule]:
    """The rules of the adapter's model, with layer numbers."""
    layers = min(number(settings, family.layers, source), LAYER_LIMIT)
    rules = family.rules(settings, _shapes(ranks[0]))
    return [
        rule if layer is None else numbered(rule, layer)
        for rule in rules
        for layer in (range(layers) if "{}" in rule.sources[0] else (None,))
    ]


def _shapes(tensors: Mapping[str, LazyTensor]) -> dict[str, tuple[int, ...]]:
    """The shapes of the weights that the adapter changes, which show whether the model's layers are fused."""
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        module, _, part = name.rpartition(".")
        if part == "lora_A" and tensor.shape and (b := tensors.get(f"{module}.lora_B")) is not None and b.shape:
            shapes[f"{module}.weight"] = (tensor.shape[0], b.shape[-1])
    return shapes


def _with_joined(config: LoraConfig, joined: Mapping[str, int]) -> LoraConfig:
    """The config with the ranks of modules that are joined from several, and alphas that keep their scale."""
    if not joined or config.rank is None:
        return config
    alphas = {count: config.alpha * (math.sqrt(count) if config.use_rslora else count) for count in joined.values()}
    return replace(
        config,
        rank_pattern={re.escape(module): config.rank * count for module, count in joined.items()},
        alpha_pattern={re.escape(module): alphas[count] for module, count in joined.items()},
    )


def _converted(
    rules: Sequence[TensorRule], ranks: Sequence[Mapping[str, LazyTensor]], source: str
) -> tuple[dict[str, Pair], dict[str, LazyTensor], dict[str, int]]:
    """Pairs by module, whole tensors by name, and the number of pairs in each joined module; uses every tensor once."""
    pairs: dict[str, Pair] = {}
    whole: dict[str, LazyTensor] = {}
    joined: dict[str, int] = {}
    left = set(ranks[0])
    for rule in rules:
        module = rule.sources[0].removesuffix(".weight")
        factors = {f"{module}.lora_A", f"{module}.lora_B"}
        if rule.sources[0] in left and left.issuperset(rule.sources):
            whole |= converted(rule, ranks, source)
            left -= set(rule.sources)
        if len(rule.sources) == 1 and rule.sources[0] != module and factors <= left:
            pairs |= _pairs(rule, module, ranks, source)
            left -= factors
        modules = [name.removesuffix(".weight") for name in rule.sources if name.endswith(".weight")]
        trained = [name for name in modules if {f"{name}.lora_A", f"{name}.lora_B"} <= left]
        if len(rule.sources) > 1 and len(rule.targets) == 1 and trained:
            target = rule.targets[0].removesuffix(".weight")
            pairs[target], joined[target] = _joined(rule, modules, trained, ranks, source), len(trained)
            left -= {f"{name}.lora_{half}" for name in trained for half in "AB"}
    if left:
        raise MalformedInput(
            f"`{source}` has {len(left)} unexpected keys: {listing(sorted(left))}",
            hint="the adapter belongs to another model than its `config.json`, or its kind is unsupported",
        )
    return pairs, whole, joined


def _pairs(rule: TensorRule, module: str, ranks: Sequence[Mapping[str, LazyTensor]], source: str) -> dict[str, Pair]:
    """The pair of each part of a module: parts of a fused one share A, and each has its own rows of B."""
    a, b = f"{module}.lora_A", f"{module}.lora_B"
    inputs, outputs = rule.shape
    rank = ranks[0][a].shape[-1]
    first = TensorRule((a,), (a,), (inputs, rank), 0 if rule.split == 0 else None, linear=True)
    split = 1 if rule.split == 1 else None
    second = TensorRule((b,), rule.targets, (rank, outputs), split, linear=True, pieces=rule.pieces, groups=rule.groups)
    shared = converted(first, ranks, source)[a]
    parts = converted(second, ranks, source)
    return {name.removesuffix(".weight"): Pair(shared, part) for name, part in parts.items()}


def _joined(
    rule: TensorRule,
    modules: Sequence[str],
    trained: Sequence[str],
    ranks: Sequence[Mapping[str, LazyTensor]],
    source: str,
) -> Pair:
    """The pair of a matrix that only transformers fuses, such as GPT's qkv: A stacked, B block-diagonal."""
    parts = {
        name: pair
        for name in trained
        for pair in _pairs(replace(rule, sources=(name,), targets=(name,)), name, ranks, source).values()
    }
    rank = sum(pair.rank for pair in parts.values())
    first = parts[trained[0]]
    blocks, column = [], 0
    for name in modules:
        part = parts.get(name)
        blocks.append(padded_columns(part.b if part else None, column, (first.b.shape[0], rank), first.b.dtype))
        column += part.rank if part else 0
    return Pair(concat([pair.a for pair in parts.values()], 0), concat(blocks, 0))


ADAPTER = AdapterFormat(
    "PaddleNLP (`lora_config.json` next to `lora_model_state*.pdparams`)",
    is_paddle_adapter,
    lambda path, base, alpha: open_paddle_adapter(path, alpha),
)
