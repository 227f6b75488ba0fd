"""What becomes of the adapter of a PEFT run: merged into its base, written beside it, or alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmconv.checkpoint import Checkpoint, open_checkpoint
from llmconv.convert.adapters.adapter import Adapter
from llmconv.convert.adapters.lora.config import parse_config
from llmconv.convert.adapters.merging import merged
from llmconv.convert.adapters.peft_tensors import to_adapter
from llmconv.convert.adapters.placement.edits import HEAD
from llmconv.convert.adapters.placement.tensor_names import match_names
from llmconv.convert.adapters.placement.vocabulary import is_tied
from llmconv.convert.algebra.operations import listing
from llmconv.convert.formats.composer.peft_run import PREFIX, PeftRun
from llmconv.errors import MalformedInput, UnsupportedInput, UsageProblem
from llmconv.model_kinds import require_model_type
from llmconv.tensors import LazyTensor

OPTIONS = ("base", "adapter")
NARROWING = ("exclude_modules", "layers_to_transform", "layers_pattern")
"""Fields of `adapter_config.json` by which PEFT leaves out modules that `target_modules` names."""


def without_adapter(options: Mapping[str, Any], source: str) -> None:
    """Refuses options that mean nothing where the run is not one of PEFT.

    Raises:
        UsageProblem: one of them is given.
    """
    if given := [name for name in OPTIONS if options.get(name)]:
        raise UsageProblem(f"`--{given[0]}` is given, but `{source}` holds no adapter", hint="leave it out")


def with_adapter(
    run: PeftRun,
    options: Mapping[str, Any],
    open_model: Callable[[dict[str, LazyTensor], Checkpoint | None], Checkpoint],
) -> Checkpoint:
    """The model with its adapter merged, or with it beside; or the adapter alone.

    Args:
        run: from `find_adapter`.
        options: `base`, the folder of the base model; `adapter`, `merge` (the default) or `split`.
        open_model: `open_model(tensors, folder)` gives the base model; `folder` is where its tensors are from, None
            where they are from the run; without tensors it gives what else the run holds.

    Raises:
        UsageProblem: a base is given that is not needed.
        UnsupportedInput: the base is needed and not given, or a kind of adapter that cannot be merged.
        MalformedInput: the adapter is of another base.
    """
    run = _of_its_base(run)
    split, folder = options.get("adapter") == "split", options.get("base")
    if run.base and folder:
        raise UsageProblem(f"`{run.path.name}` holds the base's weights too", hint="leave out `--base`")
    if not run.base and not folder and not split:
        raise UnsupportedInput(
            f"`{run.path.name}` holds a LoRA adapter without its base model",
            hint="give the base's Hugging Face folder with `--base`, or write the adapter alone with `--adapter split`",
        )
    below = open_checkpoint(Path(folder)) if folder else None
    if below:
        require_model_type(below.config, below.path)
    model = open_model(dict(below.tensors) if below else run.base, below)
    if model.tensors and not run.config.get("target_parameters"):
        _check_places(run, model)
    return _apart(run, model) if split else _merged(run, model)


def _of_its_base(run: PeftRun) -> PeftRun:
    """Without what PEFT did to the base before training, where the run holds the base as it was then."""
    if not run.base:
        return run
    config = {name: value for name, value in run.config.items() if name != "layer_replication"}
    if isinstance(config.get("init_lora_weights"), str):
        config["init_lora_weights"] = True
    return replace(run, config=config)


def _apart(run: PeftRun, model: Checkpoint) -> Checkpoint:
    try:
        config = parse_config(run.config)
    except UnsupportedInput:
        pass  # written apart as it is: PEFT knows the kind
    else:
        adapter = to_adapter(run.path, (run.path,), config, run.adapter)
        if model.tensors:
            merged(model, [adapter])  # of no use but to be checked
    place = "in the sub-folder `adapter`" if model.tensors else "alone; it needs its base model"
    note = f"the LoRA adapter is written {place}"
    parts = Checkpoint(run.path, "adapter", run.adapter, run.config)
    return replace(model, adapter=parts, warnings=(*model.warnings, note, *_lost_biases(run)))


def _check_places(run: PeftRun, model: Checkpoint) -> None:
    """Every factor has its module, and every module that PEFT adapts (`check_target_module_exists`) its factors."""
    names = model.tensors.keys() | ({HEAD} if is_tied(model.config) else set())
    homes = match_names({f"{module}.weight" for module in run.modules}, names, run.path.name)
    targets = run.config.get("target_modules")
    if not isinstance(targets, list) or any(run.config.get(field) for field in NARROWING):
        return
    ends = tuple(f".{target}.weight" for target in targets)
    adapted = {*homes.values(), *(name.removeprefix(PREFIX) for name in run.adapter)}
    if absent := [name for name in model.tensors if f".{name}".endswith(ends) and name not in adapted]:
        raise MalformedInput(
            f"the adapter in `{run.path.name}` lacks the factors of {listing(absent)}",
            hint="the checkpoint is incomplete; give another one of the run",
        )


def _lost_biases(run: PeftRun) -> list[str]:
    """`lora_only` biases never pass Composer's filter, which looks for them under a name of old PEFT versions."""
    if run.base or run.config.get("bias") != "lora_only" or any(name.endswith(".bias") for name in run.adapter):
        return []
    return ["`bias` is 'lora_only', but the file holds no bias: Composer leaves them out of adapter-only checkpoints"]


def _merged(run: PeftRun, model: Checkpoint) -> Checkpoint:
    result, edits = merged(model, [_opened(run)])
    note = f"the LoRA adapter is merged into {len(edits.changes)} weights; `--adapter split` keeps it apart"
    return replace(result, warnings=(*model.warnings, *edits.warnings, note))


def _opened(run: PeftRun) -> Adapter:
    try:
        return to_adapter(run.path, (run.path,), parse_config(run.config), run.adapter)
    except UnsupportedInput as problem:
        hint = f"{problem.hint}; `--adapter split` writes it apart"
        raise UnsupportedInput(problem.message, hint=hint) from problem


VERSIONED = ("transformers_version", "torch_dtype", "dtype", "architectures", "use_cache")
"""Fields that differ between a base and a run of it without changing what the model computes."""


def differences(stored: Mapping[str, Any], base: Mapping[str, Any]) -> list[str]:
    """A warning where the run's configuration is not that of the base folder; fields that only one has do not count.

    Raises:
        MalformedInput: they are of different model types.
    """
    differing = sorted(name for name in stored.keys() & base.keys() if stored[name] != base[name])
    if "model_type" in differing:
        raise MalformedInput(
            f"the run is of a `{stored['model_type']}`, the base folder of a `{base['model_type']}`",
            hint="give the model that training started from with `--base`",
        )
    named = [name for name in differing if name not in VERSIONED and not name.startswith("_")]
    return [f"the run's configuration differs from the base's in {listing(named)}; the run's is used"] if named else []


def generation_settings(base: Checkpoint | None) -> dict[str, bytes]:
    """`generation_config.json` of the base, which a run does not hold."""
    name = "generation_config.json"
    return {name: base.side_files[name]} if base and name in base.side_files else {}
