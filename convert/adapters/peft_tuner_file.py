"""Files of PEFT's adapters other than LoRA: config, tensors of each module, and whole tensors.

Layout (PEFT `save_pretrained`): as LoRA's, with `base_model.model.<module>.<part>` for each of the tuner's parts, some
followed by `.weight`, and tensors shared by all modules as `base_model.<part>`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from llmconv.checkpoint import read_json
from llmconv.convert.adapters.adapter import Adapter, check
from llmconv.convert.adapters.lora.config import LoraConfig, task_of
from llmconv.convert.adapters.lora.saved_modules import WholeTensors, place_once
from llmconv.convert.adapters.peft_file import WEIGHTS, read_tensors
from llmconv.convert.adapters.peft_tensors import CONFIG, plain_name
from llmconv.convert.adapters.tuners import Tuner, by_peft_type
from llmconv.convert.adapters.tuners.config_fields import AdapterFields, invalid_field
from llmconv.convert.adapters.tuners.module_tensors import ModuleTensors
from llmconv.errors import InputRefused, UnsupportedInput, UsageProblem
from llmconv.tensors import LazyTensor

KNOWN = {
    *("peft_type", "peft_version", "task_type", "inference_mode", "auto_mapping", "base_model_name_or_path"),
    *("revision", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "modules_to_save"),
    *("bias", "fan_in_fan_out", "init_weights", "init_ia3_weights"),
}
"""Fields that most tuners have: read, or irrelevant to the merged weight."""

LORA_ONLY = (
    *("use_dora", "lora_bias", "layer_replication", "target_parameters", "trainable_token_indices"),
    *("alora_invocation_tokens", "arrow_config", "use_qalora", "use_bdlora", "kasa_config", "megatron_config"),
)
"""Fields without a known meaning for other tuners."""


def is_tuned(path: Path) -> bool:
    """Whether the folder's config has another `peft_type` than LORA."""
    config = (path if path.is_dir() else path.parent) / CONFIG
    return config.is_file() and isinstance(kind := read_json(config).get("peft_type"), str) and kind != "LORA"


def open_tuned(path: Path, alpha: float | None = None) -> Adapter:
    """Opens an adapter folder (or the weights file in one) of a kind in `tuners/kinds/`.

    Args:
        path: the folder, or its `adapter_model.*` file.
        alpha: must be None: these kinds store their scale in the config.

    Raises:
        InputRefused: the weights are missing.
        MalformedInput: incomplete, two adapters in one file, or values that are not finite.
        UnsupportedInput: a kind that cannot be merged, or an unknown one.
        UsageProblem: `alpha` is given.
    """
    folder = path if path.is_dir() else path.parent
    fields = read_json(folder / CONFIG)
    tuner = by_peft_type(fields["peft_type"])
    if alpha is not None:
        raise UsageProblem(
            f"`--alpha` is for LoRA, the adapter is of `peft_type` {tuner.peft_type!r}",
            hint="leave out `--alpha`; to merge more or less of an adapter give `--weight`",
        )
    weights = next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)
    if weights is None:
        raise InputRefused(f"`{folder}` contains no adapter weights", hint=f"it needs `{WEIGHTS[0]}`")
    settings = AdapterFields(fields)
    learned, wholes = _sort(read_tensors(weights), weights.name, tuner, settings)
    config = _config(settings, tuner)
    whole, originals = wholes.all(), wholes.untrained(config.modules_to_save)
    adapter = Adapter(folder, (weights,), folder / CONFIG, config, {}, whole, originals, learned=learned, tuner=tuner)
    check(adapter)
    return adapter


def _config(settings: AdapterFields, tuner: Tuner) -> LoraConfig:
    """The fields that LoRA has, too."""
    if alien := [name for name in LORA_ONLY if settings.fields.get(name) and name not in tuner.fields]:
        raise UnsupportedInput(
            f"the adapter is of `peft_type` {tuner.peft_type!r} and sets `{alien[0]}`, which only LoRA has",
            hint="merge it with PEFT's `merge_and_unload` and `save_pretrained`",
        )
    unknown = sorted(name for name, value in settings.fields.items() if value and name not in {*KNOWN, *tuner.fields})
    if not isinstance(bias := settings.fields.get("bias") or "none", str):
        raise invalid_field("bias", bias)
    return LoraConfig(
        rank=None,
        alpha=1,
        use_rslora=False,
        rank_pattern={},
        alpha_pattern={},
        task=task_of(settings.fields),
        modules_to_save=settings.names("modules_to_save"),
        bias=bias,
        warnings=tuple(f"the adapter config sets `{name}`, an unknown field, which is ignored" for name in unknown),
    )


def _sort(
    tensors: Mapping[str, LazyTensor], file: str, tuner: Tuner, settings: AdapterFields
) -> tuple[dict[str, ModuleTensors], WholeTensors]:
    """Parts by module, and whole tensors; every tensor goes to exactly one place."""
    part = re.compile(rf"(?P<module>.+?)\.(?P<part>{'|'.join(tuner.parts) or '(?!)'})(?:\.\w+)??(?:\.weight)?")
    common = re.compile(rf"(?:base_model\.)?(?P<part>{'|'.join(tuner.shared) or '(?!)'})(?:\.\w+)?")
    modules: dict[str, dict[str, LazyTensor]] = {}
    shared: dict[str, LazyTensor] = {}
    wholes = WholeTensors()
    for name, tensor in tensors.items():
        plain = plain_name(name)
        if match := common.fullmatch(plain):
            place, key = shared, match["part"]
        elif match := part.fullmatch(plain):
            place, key = modules.setdefault(match["module"], {}), match["part"]
        else:
            place, key = wholes.place(plain)
        place_once(place, key, tensor, f"`{file}` contains `{name}`", may_repeat=place is wholes.trained)
    return {module: ModuleTensors(module, {**shared, **parts}, settings) for module, parts in modules.items()}, wholes
