"""PEFT (LoRA) runs: the adapter is merged into its base, written next to it, or alone.

Layout: the whole PeftModel, as
trainers save it, with `adapter_config.json` next to it; adapter and base are separated by their names. Composer
(mosaicml/composer `models/huggingface.py`) holds that file as `peft_config`, and with `should_save_peft_only` (the
default) keeps only the tensors of `filter_state_dict_peft`. Names are those of the running model (PEFT
`tuners/lora/layer.py`, `utils/other.py`): `….q_proj.base_layer.weight`, `….q_proj.lora_A.default.weight`,
`lm_head.original_module.weight`, `lm_head.modules_to_save.default.weight`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmconv.causal_lm import require_model_type
from llmconv.checkpoint import Checkpoint, open_checkpoint, refuse_mlx_layers, unmerged
from llmconv.convert.adapters.adapter import Adapter
from llmconv.convert.adapters.edits import base_in_memory
from llmconv.convert.adapters.lora_config import FORMULA, AdapterFields, parse_config
from llmconv.convert.adapters.merging import merged
from llmconv.convert.adapters.peft_file import WHOLE, saved_name, to_adapter
from llmconv.convert.adapters.tensor_names import AS_STORED, match_names
from llmconv.convert.models.completeness import check_complete, check_folder
from llmconv.convert.models.config_file import is_other_class, without_code
from llmconv.convert.models.head_and_dtype import settled, with_tied_head
from llmconv.errors import InputRefused, MalformedInput, UnsupportedInput, UsageProblem, listing
from llmconv.tensors import LazyTensor

NARROWING = ("exclude_modules", "layers_to_transform", "layers_pattern")
"""Fields of `adapter_config.json` with which PEFT skips modules of `target_modules`."""

PREFIX = "base_model.model."
# Components that PEFT inserts into the names of the base's own tensors
PARTS_OF_BASE = ("base_layer", "original_module", "token_adapter")
SAVE_ALL = "give a checkpoint with the whole model; Composer saves one with `should_save_peft_only=False`"


@dataclass(frozen=True)
class PeftRun:
    """The adapter of a PEFT run, as PEFT saves it, and the base; empty if only the adapter was saved."""

    path: Path
    config: dict[str, Any]
    base: dict[str, LazyTensor]
    adapter: dict[str, LazyTensor]

    @property
    def modules(self) -> set[str]:
        """Paths of the modules with low-rank factors."""
        plain_names = (name.removeprefix(PREFIX) for name in self.adapter)
        return {name.partition(".lora_")[0] for name in plain_names if ".lora_" in name}

    def opened(self, alpha: float | None = None) -> Adapter:
        """UnsupportedInput if it cannot be merged; `alpha`: where the config has none."""
        return to_adapter(self.path, (self.path,), parse_config(self.config, alpha), self.adapter)


def find_adapter(stored: Mapping[str, Any], tensors: Mapping[str, LazyTensor], path: Path) -> PeftRun:
    """Adapter (`stored`: its config, or empty) and base model.

    Raises MalformedInput for contradictions or foreign names, UnsupportedInput for another method, several adapters, or
    trained parts that were not saved.
    """
    config, _ = without_code(dict(stored))
    refuse_mlx_layers(tensors, path.name)
    if not config:
        raise _without_config(tensors, path.name)
    tensors = _without_attribute(tensors)
    if not any(name.startswith(PREFIX) for name in tensors):  # the inner model of a PeftModel, saved alone
        tensors = {PREFIX + name: tensor for name, tensor in tensors.items()}
    _require(path, config, tensors)
    base: dict[str, LazyTensor] = {}
    adapter: dict[str, LazyTensor] = {}
    labels: set[str] = set()
    for name, tensor in tensors.items():
        saved, label = saved_name(name)
        half, key = (adapter, saved) if saved else (base, _base_name(name))
        labels |= {label} if saved else set()
        if key in half and len(labels) == 1:
            raise MalformedInput(f"duplicate key `{key}` in `{path.name}`, under different names", hint="save it again")
        if key in half or len(labels - {""}) > 1:
            label = listing(sorted(labels - {""}))
            raise UnsupportedInput(
                f"`{path.name}` holds several adapters: {label}", hint="save with all but one deleted"
            )
        half[key] = tensor
    if all(name.endswith(".bias") for name in base):
        adapter |= {PREFIX + name: tensor for name, tensor in base.items()}
        base = {}
    found = PeftRun(path, config, base, adapter)
    # adds trained biases, which lie in the base's modules, to the adapter, as PEFT does
    given = AdapterFields(found.config)
    if (expected := found.config.get("bias") or "none") not in ("none", "all", "lora_only"):
        raise given.invalid("bias", expected)
    for name, tensor in tensors.items() if expected != "none" else ():
        module = _base_name(name).removesuffix(".bias")
        if name.endswith(".bias") and not saved_name(name)[0] and (expected == "all" or module in found.modules):
            found.adapter.pop(PREFIX + _base_name(name), None)
            found.adapter[name] = tensor
    _require_complete(found)
    return found


def _without_config(tensors: Mapping[str, LazyTensor], name: str) -> InputRefused:
    parts = unmerged(tensors, {})
    if not any("lora_" in one or "base_layer" in one for one in parts):
        return UnsupportedInput(
            f"`{name}` holds tensors of an adapter that is not merged, and not LoRA's: {listing(parts)}",
            hint="merge it where it was trained: PEFT's `merge_and_unload`, then `save_pretrained`",
        )
    return MalformedInput(
        f"`{name}` holds tensors of an adapter that is not merged, and their scale is unknown: {listing(parts)}",
        hint="put the run's `adapter_config.json` next to it; of Composer, give one saved with its `integrations`",
    )


def _without_attribute(tensors: Mapping[str, LazyTensor]) -> Mapping[str, LazyTensor]:
    """The tensors without the name that a trainer's module has for the PeftModel in it, which is before all of them."""
    starts = {name[:at] if (at := name.find(PREFIX)) >= 0 else None for name in tensors}
    start = next(iter(starts), None) if len(starts) == 1 else None
    return {name.removeprefix(start): tensor for name, tensor in tensors.items()} if start else tensors


def _base_name(name: str) -> str:
    return ".".join(part for part in name.removeprefix(PREFIX).split(".") if part not in PARTS_OF_BASE)


def _require(path: Path, config: Mapping[str, Any], tensors: Mapping[str, LazyTensor]) -> None:
    if (kind := config.get("peft_type")) != "LORA":
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
    saved = AdapterFields(run.config).names(WHOLE)
    # PEFT adds both names of a classifier's head (`PeftModelForSequenceClassification`), and a model has one of them
    heads = any(_holds(modules, head) for head in HEADS_OF_CLASSIFIERS)
    lost = [
        f"`{WHOLE}` ({expected})"
        for expected in saved
        if not _holds(modules, expected) and (not run.base or _holds(below, expected))
        if not (heads and expected in HEADS_OF_CLASSIFIERS)
    ]
    if run.config.get("trainable_token_indices") and not any(name.endswith("trainable_tokens_delta") for name in names):
        lost.append("`trainable_token_indices`")
    if lost:
        raise UnsupportedInput(f"`{run.path.name}` was saved without the tensors trained by {lost[0]}", hint=SAVE_ALL)


HEADS_OF_CLASSIFIERS = ("classifier", "score")


def _holds(modules: set[str], expected: str) -> bool:
    return any(f".{expected}." in f".{module}." for module in modules)


def with_adapter(
    run: PeftRun,
    options: Mapping[str, Any],
    open_model: Callable[[dict[str, LazyTensor], Checkpoint | None], Checkpoint],
) -> Checkpoint:
    """The model with its adapter merged or (`split`) kept separately, or the adapter alone, by the `options`.

    `open_model(tensors, base)` returns the base model, of `base` if its tensors are not the run's; without tensors the
    other contents. Raises UsageProblem for a superfluous base, UnsupportedInput without a needed one, or if the adapter
    cannot be merged, MalformedInput for another base.
    """
    if run.base:  # without options for changes that PEFT made to it before training, which it has
        own = {name: value for name, value in run.config.items() if name != "layer_replication"}
        made = {"init_lora_weights": True} if isinstance(own.get("init_lora_weights"), str) else {}
        run = replace(run, config=own | made)
    split, folder = options.get("adapter") == "split", options.get("base")
    if run.base and folder:
        raise UsageProblem(f"`{run.path.name}` holds the base's weights too", hint="leave out `--base`")
    if not run.base and not folder and not split:
        raise UnsupportedInput(
            f"`{run.path.name}` holds a LoRA adapter without its base model",
            hint="give the base's Hugging Face folder with `--base`, or write the adapter alone with `--adapter split`",
        )
    if base := open_checkpoint(Path(folder)) if folder else None:
        require_model_type(base.config, base.path)
    model = settled(open_model(dict(base.tensors) if base else run.base, base))
    if base:
        check = check_folder if is_other_class(model.config) else check_complete
        check(model.tensors, model.config, run.path.name)  # or the names of its modules are compared in vain
    if model.tensors and not run.config.get("target_parameters"):
        _check_places(run, model)
    if split:
        return _separate(run, model)
    try:
        adapter = run.opened()
    except UnsupportedInput as problem:
        hint = f"{problem.hint}; `--adapter split` writes it separately"
        raise UnsupportedInput(problem.message, hint=hint) from problem
    result, edits = merged(model, [adapter])
    note = f"the LoRA adapter is merged into {len(edits.changes)} weights; `--adapter split` keeps it apart"
    return replace(result, warnings=(*model.warnings, *edits.warnings, note))


def _separate(run: PeftRun, model: Checkpoint) -> Checkpoint:
    try:
        config = parse_config(run.config)
    except UnsupportedInput:
        pass  # written unchanged: PEFT supports it
    else:
        adapter = to_adapter(run.path, (run.path,), config, run.adapter)
        if model.tensors:
            merged(model, [adapter])  # only to check it
    place = "in the sub-folder `adapter`" if model.tensors else "alone; it needs its base model"
    note = f"the LoRA adapter is written {place}"
    parts = Checkpoint(run.path, "adapter", run.adapter, run.config)
    lost = []
    if not run.base and run.config.get("bias") == "lora_only" and not any(n.endswith(".bias") for n in run.adapter):
        # Composer looks for them under a name of old PEFT versions, and drops them
        lost.append("`bias` is 'lora_only', but the file holds no bias: Composer leaves them out of adapter-only files")
    return replace(model, adapter=parts, warnings=(*model.warnings, note, *lost))


def _check_places(run: PeftRun, model: Checkpoint) -> None:
    """Refuses factors without a module, and modules that PEFT adapts (`check_target_module_exists`) without factors."""
    wanted = {f"{module}.weight" for module in run.modules}
    whole = with_tied_head(model, model.config)
    names: Collection[str] = whole.keys()
    naming = AS_STORED
    adapters = []
    with suppress(UnsupportedInput):  # written unchanged, or refused later
        adapters = [] if wanted <= {*names} else [run.opened()]
    if adapters and (memory := base_in_memory(model, whole, adapters)):
        names, naming = memory.model, memory.naming
    homes = match_names(wanted, names, run.path.name, naming.spelled)
    targets = run.config.get("target_modules")
    if not isinstance(targets, list) or any(run.config.get(field) for field in NARROWING):
        return
    ends = tuple(f".{target}.weight" for target in targets)
    adapted = {*homes.values(), *(name.removeprefix(PREFIX) for name in run.adapter)}
    if absent := [name for name in names if f".{name}".endswith(ends) and name not in adapted]:
        raise MalformedInput(
            f"the adapter in `{run.path.name}` lacks the factors of {listing(absent)}",
            hint="the checkpoint is incomplete; give another one of the run",
        )
