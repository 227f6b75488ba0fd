"""Separates the adapter and the base model of a checkpoint of a PEFT (LoRA) run, by their names.

Layout: the whole PeftModel, as trainers save it, with `adapter_config.json` next to it. Composer (mosaicml/composer
`models/huggingface.py`) holds that file as `peft_config`, and with `should_save_peft_only` (the default) keeps only the
tensors of `filter_state_dict_peft`. Names are those of the running model (PEFT `tuners/lora/layer.py`,
`utils/other.py`): `….q_proj.base_layer.weight`, `….q_proj.lora_A.default.weight`, `lm_head.original_module.weight`,
`lm_head.modules_to_save.default.weight`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmconv.convert.adapters.lora.config import FORMULA
from llmconv.convert.models.config_file import without_code
from llmconv.errors import MalformedInput, UnsupportedInput, listing
from llmconv.tensors import LazyTensor

PREFIX = "base_model.model."
LEAVES = ("weight", "bias")
WHOLE = "modules_to_save"
PARTS_OF_BASE = ("base_layer", "original_module", "token_adapter")
"""Components that PEFT inserts into the names of the base's own tensors."""

SAVE_ALL = "give a checkpoint with the whole model; Composer saves one with `should_save_peft_only=False`"


@dataclass(frozen=True)
class PeftRun:
    """The adapter and the base model of a PEFT run.

    Attributes:
        path: the checkpoint, for messages.
        config: the content of `adapter_config.json`.
        base: Hugging Face name to tensor of the base; empty if only the adapter was saved.
        adapter: the adapter's tensors in the names that PEFT saves.
    """

    path: Path
    config: dict[str, Any]
    base: dict[str, LazyTensor]
    adapter: dict[str, LazyTensor]

    @property
    def modules(self) -> set[str]:
        """Paths of the modules with low-rank factors."""
        plain_names = (name.removeprefix(PREFIX) for name in self.adapter)
        return {name.partition(".lora_")[0] for name in plain_names if ".lora_" in name}


def find_adapter(stored: Mapping[str, Any], tensors: Mapping[str, LazyTensor], path: Path) -> PeftRun | None:
    """Adapter and base model, or None if the run does not use PEFT.

    Args:
        stored: content of `adapter_config.json`; empty if the run has none.
        tensors: the run's tensors, without the trainers' wrappers in their names.
        path: the checkpoint, for messages.

    Raises:
        MalformedInput: `peft_config` and the tensors contradict each other, or a name belongs to neither model.
        UnsupportedInput: the method is not LoRA, there are several adapters, or trained parts were not saved.
    """
    if not stored and not any(".lora_" in name for name in tensors):
        return None
    config, _ = without_code(dict(stored))
    _require(path, config, tensors)
    base, adapter = _separate(tensors, path.name)
    if all(name.endswith(".bias") for name in base):
        adapter |= {PREFIX + name: tensor for name, tensor in base.items()}
        base = {}
    found = PeftRun(path, config, base, adapter)
    _add_biases(found, tensors)
    _require_complete(found)
    return found


def _require(path: Path, stored: Mapping[str, Any], tensors: Mapping[str, LazyTensor]) -> None:
    if not stored:
        raise MalformedInput(
            f"`{path.name}` holds LoRA tensors and no `peft_config`, so their scale is unknown",
            hint="put the run's `adapter_config.json` next to it; of Composer, give one saved with its `integrations`",
        )
    if (kind := stored.get("peft_type")) != "LORA":
        raise UnsupportedInput(f"the adapter in `{path.name}` has `peft_type` {kind!r}, not 'LORA'", hint=FORMULA)
    if not any(".lora_" in name for name in tensors):
        raise MalformedInput(
            f"`{path.name}` is a PEFT run, but holds no LoRA tensors", hint="it is incomplete; give another checkpoint"
        )
    if foreign := [name for name in tensors if not name.startswith(PREFIX)]:
        raise MalformedInput(
            f"`{path.name}` is a PEFT run, but {len(foreign)} tensors are not of its PeftModel: {listing(foreign)}",
            hint="two models are mixed in one file; save the PEFT model alone",
        )


def _separate(tensors: Mapping[str, LazyTensor], source: str) -> tuple[dict[str, LazyTensor], dict[str, LazyTensor]]:
    """The tensors of the base and those of the adapter.

    Raises:
        UnsupportedInput: there are several adapters.
        MalformedInput: a name is duplicate.
    """
    base: dict[str, LazyTensor] = {}
    adapter: dict[str, LazyTensor] = {}
    labels: set[str] = set()
    for name, tensor in tensors.items():
        saved, label = saved_name(name)
        half, key = (adapter, saved) if saved else (base, _base_name(name))
        labels |= {label} if saved else set()
        if key in half:
            if len(labels) == 1:
                raise MalformedInput(
                    f"duplicate key `{key}` in `{source}`, under different names", hint="save it again"
                )
            raise _several(source, labels)
        half[key] = tensor
    if len(labels - {""}) > 1:
        raise _several(source, labels)
    return base, adapter


def _several(source: str, labels: set[str]) -> UnsupportedInput:
    names = listing(sorted(labels - {""}))
    return UnsupportedInput(f"`{source}` holds several adapters: {names}", hint="delete all but one before saving")


def saved_name(name: str) -> tuple[str, str]:
    """PEFT's name of an adapter's tensor in files, and the adapter's label; empty for a tensor of the base.

    PEFT (`utils/save_and_load.py`, `get_peft_model_state_dict`) removes the label, the component `modules_to_save`,
    and the `.weight` of a DoRA magnitude.

    Args:
        name: of a tensor of a running PeftModel, or as PEFT saves it.
    """
    parts = name.split(".")
    kinds = (WHOLE, "trainable_tokens_delta")
    at = next((i for i, part in enumerate(parts) if part.startswith("lora_") or part in kinds), None)
    if at is None:
        return "", ""
    kind, tail = parts[at], parts[at + 1 :]
    label = tail.pop(0) if tail and tail[0] not in LEAVES else ""
    if kind == "lora_magnitude_vector":
        tail = []
    return ".".join([*parts[:at], *([] if kind == WHOLE else [kind]), *tail]), label


def _base_name(name: str) -> str:
    return ".".join(part for part in name.removeprefix(PREFIX).split(".") if part not in PARTS_OF_BASE)


def _add_biases(run: PeftRun, tensors: Mapping[str, LazyTensor]) -> None:
    """Adds trained biases, which lie in the base's modules, to the adapter, as PEFT does."""
    if (expected := run.config.get("bias") or "none") not in ("none", "all", "lora_only"):
        raise _invalid("bias", expected)
    for name, tensor in tensors.items() if expected != "none" else ():
        module = _base_name(name).removesuffix(".bias")
        if name.endswith(".bias") and not saved_name(name)[0] and (expected == "all" or module in run.modules):
            run.adapter.pop(PREFIX + _base_name(name), None)
            run.adapter[name] = tensor


def _require_complete(run: PeftRun) -> None:
    """Refuses a run that lacks a factor, or another trained part."""
    names = {name.removeprefix(PREFIX) for name in run.adapter}
    for a, b in (("lora_A.weight", "lora_B.weight"), ("lora_embedding_A", "lora_embedding_B")):
        halves = [{name.removesuffix(half) for name in names if name.endswith("." + half)} for half in (a, b)]
        if single := sorted(halves[0] ^ halves[1]):
            raise MalformedInput(
                f"the adapter in `{run.path.name}` lacks a factor of {listing([name[:-1] for name in single])}",
                hint="the checkpoint is incomplete; give another one of the run",
            )
    modules = {name.rpartition(".")[0] for name in names if ".lora_" not in name}
    below = {name.rpartition(".")[0] for name in run.base}
    if not isinstance(saved := run.config.get(WHOLE) or [], list):
        raise _invalid(WHOLE, saved)
    for expected in saved:
        if not _holds(modules, str(expected)) and (not run.base or _holds(below, str(expected))):
            raise _lost(run, f"`{WHOLE}` ({expected})")
    if run.config.get("trainable_token_indices") and not any(name.endswith("trainable_tokens_delta") for name in names):
        raise _lost(run, "`trainable_token_indices`")


def _invalid(name: str, value: Any) -> MalformedInput:
    return MalformedInput(
        f"`{name}` in the adapter config is invalid: {value!r}", hint="give another checkpoint of the run"
    )


def _holds(modules: set[str], expected: str) -> bool:
    return any(f".{expected}." in f".{module}." for module in modules)


def _lost(run: PeftRun, option: str) -> UnsupportedInput:
    return UnsupportedInput(f"`{run.path.name}` was saved without the tensors trained by {option}", hint=SAVE_ALL)
