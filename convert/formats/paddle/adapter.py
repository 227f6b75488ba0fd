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
from llmconv.convert.adapters.adapter import Adapter
from llmconv.convert.adapters.lora_config import LoraConfig
from llmconv.convert.adapters.other_tools import ForeignPair, as_adapter, joined_pair
from llmconv.convert.fields import Fields
from llmconv.convert.formats import AdapterFormat
from llmconv.convert.formats.paddle.config import to_config
from llmconv.convert.formats.paddle.names import FAMILIES, TensorRule, converted, unrolled
from llmconv.convert.formats.paddle.read import open_rank_files
from llmconv.errors import InputRefused, MalformedInput, UnsupportedInput, listing, short
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
    matches = [match for entry in folder.iterdir() if (match := FILE.fullmatch(entry.name))]
    files = {(int(match[1] or 0), int(match[2] or 0)): folder / match[0] for match in matches}
    if not files or not (folder / "config.json").is_file():
        absent = "config.json" if files else "lora_model_state.pdparams"
        raise InputRefused(
            f"the adapter `{folder.name}` has no `{absent}`",
            hint="copy the whole folder that PaddleNLP's `LoRAModel.save_pretrained` wrote",
        )
    fields, model = read_json(folder / CONFIG), read_json(folder / "config.json")
    for name, reason in REFUSED.items():
        if fields.get(name):
            raise UnsupportedInput(
                f"the adapter sets `{name}`: {reason}", hint="merge it with PaddleNLP's `merge_lora_params.py`"
            )
    ranks, settings = open_rank_files(folder, files, fields), to_config(model, folder.name, [])
    # the shapes of the weights that the adapter changes, which show whether the model's layers are fused
    shapes = {name: tensor.shape for name, tensor in ranks[0].items()}
    for name, tensor in ranks[0].items():
        module, _, part = name.rpartition(".")
        if part == "lora_A" and tensor.shape and (b := ranks[0].get(f"{module}.lora_B")) is not None and b.shape:
            shapes[f"{module}.weight"] = (tensor.shape[0], b.shape[-1])
    family = FAMILIES[model["model_type"]]
    layers = min(Fields(settings, folder.name).count(family.layers), LAYER_LIMIT)
    pairs, whole = _converted(unrolled(family.rules(settings, shapes), layers), ranks, folder.name)
    bias = "all" if fields.get("trainable_bias") in ("all", "lora") else "none"
    own = {"r": fields.get("r"), "use_rslora": fields.get("rslora"), "bias": bias}
    own |= {"lora_alpha": stated} if (stated := fields.get("lora_alpha", 8 if alpha is None else None)) else {}
    opened = as_adapter(sorted(files.values()), folder / CONFIG, own, pairs, alpha, whole)
    _check_scaling(fields.get("scaling"), opened.config)
    return replace(opened, originals={}, model_type=str(settings["model_type"]))


def _check_scaling(stated: Any, config: LoraConfig) -> None:
    """Refuses a stored `scaling` other than that of the other fields, from which PaddleNLP computes it."""
    if not isinstance(stated, int | float) or not config.rank:
        return
    computed = config.scale("", config.rank)
    if abs(stated) > sys.float_info.max or not math.isclose(stated, computed, rel_tol=1e-6):
        raise MalformedInput(
            f"the adapter declares `scaling` {short(stated)}, but `lora_alpha` and `r` result in {computed:g}",
            hint=f"repair `{CONFIG}`; PaddleNLP computes `scaling` from the other two",
        )


def _converted(
    rules: Sequence[TensorRule], ranks: Sequence[Mapping[str, LazyTensor]], source: str
) -> tuple[dict[str, ForeignPair], dict[str, LazyTensor]]:
    """Pairs by module, and whole tensors by name; uses every tensor once."""
    pairs: dict[str, ForeignPair] = {}
    whole: dict[str, LazyTensor] = {}
    left = set(ranks[0])
    for rule in rules:
        if rule.sources[0] in left and left.issuperset(rule.sources):
            whole |= converted(rule, ranks, source)
            left -= set(rule.sources)
        modules = [name.removesuffix(".weight") for name in rule.sources if name.endswith(".weight")]
        trained = [name for name in modules if {f"{name}.lora_A", f"{name}.lora_B"} <= left]
        left -= {f"{name}.lora_{half}" for name in trained for half in "AB"}
        if len(rule.sources) == 1:
            pairs |= {own: pair for name in trained for own, pair in _pairs(rule, name, ranks, source).items()}
        elif trained:  # a matrix that only transformers fuses, such as GPT's qkv
            single = [replace(rule, sources=(name,), targets=(name,)) for name in modules]
            found = [
                _pairs(one, name, ranks, source)[name] if name in trained else None
                for one, name in zip(single, modules, strict=True)
            ]
            target = rule.targets[0].removesuffix(".weight")
            pairs[target] = joined_pair(target, found, [rule.shape[1]] * len(found), source)
    if left:
        raise MalformedInput(
            f"`{source}` has {len(left)} unexpected keys: {listing(sorted(left))}",
            hint="the adapter belongs to another model than its `config.json`, or its kind is unsupported",
        )
    return pairs, whole


def _pairs(
    rule: TensorRule, module: str, ranks: Sequence[Mapping[str, LazyTensor]], source: str
) -> dict[str, ForeignPair]:
    """The pair of each part of a module: parts of a fused one share A, and each has its own rows of B."""
    a, b = f"{module}.lora_A", f"{module}.lora_B"
    inputs, outputs = rule.shape
    rank = ranks[0][a].shape[-1]
    first = TensorRule((a,), (a,), (inputs, rank), 0 if rule.split == 0 else None, linear=True)
    split = 1 if rule.split == 1 else None
    second = TensorRule((b,), rule.targets, (rank, outputs), split, linear=True, pieces=rule.pieces, groups=rule.groups)
    shared = converted(first, ranks, source)[a]
    parts = converted(second, ranks, source)
    return {name.removesuffix(".weight"): ForeignPair(shared, part) for name, part in parts.items()}


ADAPTER = AdapterFormat(
    "PaddleNLP (`lora_config.json` next to `lora_model_state*.pdparams`)",
    is_paddle_adapter,
    lambda path, base, alpha: open_paddle_adapter(path, alpha),
)
