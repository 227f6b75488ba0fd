"""Outputs of a checkpoint of a PEFT run: the adapter merged into its base, written next to it, or alone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmconv.causal_lm import require_model_type
from llmconv.checkpoint import ADAPTER_CONFIG, Checkpoint, open_checkpoint, read_json
from llmconv.convert.adapters.adapter import Adapter
from llmconv.convert.adapters.lora.config import parse_config
from llmconv.convert.adapters.merging import merged, with_tied_head
from llmconv.convert.adapters.peft_tensors import to_adapter
from llmconv.convert.adapters.placement.base_in_memory import BaseInMemory, base_in_memory
from llmconv.convert.adapters.placement.naming import AS_STORED
from llmconv.convert.adapters.placement.tensor_names import match_names
from llmconv.convert.models.completeness import check_complete, select
from llmconv.convert.models.tied_head import settled
from llmconv.convert.peft_runs.split import PREFIX, PeftRun, find_adapter
from llmconv.convert.state_dicts.checkpoint import assemble, side_files_of
from llmconv.convert.state_dicts.files import StateFile
from llmconv.errors import MalformedInput, UnsupportedInput, UsageProblem, listing
from llmconv.tensors import LazyTensor

OPTIONS = ("base", "adapter")
NARROWING = ("exclude_modules", "layers_to_transform", "layers_pattern")
"""Fields of `adapter_config.json` with which PEFT skips modules of `target_modules`."""


def without_adapter(options: Mapping[str, Any], source: str) -> None:
    """Refuses options that have no meaning for a run without PEFT.

    Raises:
        UsageProblem: one of them is given.
    """
    if given := [name for name in OPTIONS if options.get(name)]:
        raise UsageProblem(f"`--{given[0]}` is given, but `{source}` contains no adapter", hint="leave it out")


def opened_with_adapter(
    tensors: dict[str, LazyTensor],
    path: Path,
    options: Mapping[str, Any],
    open_model: Callable[[dict[str, LazyTensor], Checkpoint | None], Checkpoint],
) -> Checkpoint:
    """The model of a checkpoint, whose adapter's config lies next to it or above if it has an adapter.

    Args:
        tensors: those of the checkpoint, without the trainers' wrappers in their names.
        path: the checkpoint.
        options: those of `with_adapter`.
        open_model: see `with_adapter`.

    Raises:
        MalformedInput: there is no config; see also `find_adapter` and `with_adapter`.
    """
    if not any(".lora_" in name for name in tensors):
        without_adapter(options, path.name)
        return open_model(tensors, None)
    homes = [path, *path.absolute().parents[:2]]
    file = next((home / ADAPTER_CONFIG for home in homes if (home / ADAPTER_CONFIG).is_file()), None)
    run = find_adapter(read_json(file) if file else {}, tensors, path)
    assert run
    return with_adapter(run, options, open_model)


def assembled_run(file: StateFile, format: str, options: Mapping[str, Any], tokenizer: Path | None) -> Checkpoint:
    """The model of a state dict, with its adapter if it is that of a PeftModel; see `assemble`.

    Args:
        file: the state dict.
        format: name of the format.
        options: fields that the user adds to the configuration, and options of the command.
        tokenizer: the user's, instead of the files next to the checkpoint.

    Raises:
        InputRefused: see `assemble` and `opened_with_adapter`.
    """
    given = {name: value for name, value in options.items() if name not in OPTIONS}
    if not any(".lora_" in name for name in file.state):
        without_adapter(options, file.path.name)
        return assemble(file, format, given, tokenizer)

    def open_model(tensors: dict[str, LazyTensor], base: Checkpoint | None) -> Checkpoint:
        side_files = {**(base.side_files if base else {}), **side_files_of(file.path, tokenizer)}
        if not tensors:
            return Checkpoint(file.path, format, {}, {}, side_files, shards=file.shards)
        part = replace(file, state=tensors, tensor=lambda name, leaf: leaf)
        settings = {**(base.config if base else {}), **given}
        return replace(assemble(part, format, settings, tokenizer), side_files=side_files)

    warnings: list[str] = []
    tensors = select(file.state, file.tensor, file.path.name, warnings)
    opened = opened_with_adapter(tensors, file.path, options, open_model)
    return replace(opened, warnings=(*warnings, *opened.warnings))


def with_adapter(
    run: PeftRun,
    options: Mapping[str, Any],
    open_model: Callable[[dict[str, LazyTensor], Checkpoint | None], Checkpoint],
) -> Checkpoint:
    """The model with its adapter merged or kept separately, or the adapter alone.

    Args:
        run: from `find_adapter`.
        options: `base`, the folder of the base model; `adapter`, `merge` (the default) or `split`.
        open_model: `open_model(tensors, folder)` returns the base model; `folder` is the source of its tensors, None if
            they are from the run; without tensors it returns the other contents of the run.

    Raises:
        UsageProblem: a base is given but not needed.
        UnsupportedInput: the base is needed but not given, or the adapter cannot be merged.
        MalformedInput: the adapter belongs to another base.
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
    base = open_checkpoint(Path(folder)) if folder else None
    if base:
        require_model_type(base.config, base.path)
    model = settled(open_model(dict(base.tensors) if base else run.base, base))
    if base:
        check_complete(model.tensors, model.config, run.path.name)  # or the names of its modules are compared in vain
    if model.tensors and not run.config.get("target_parameters"):
        _check_places(run, model)
    return _separate(run, model) if split else _merged(run, model)


def _of_its_base(run: PeftRun) -> PeftRun:
    """Removes options for changes that PEFT made to the base before training, if the run contains the changed base."""
    if not run.base:
        return run
    config = {name: value for name, value in run.config.items() if name != "layer_replication"}
    if isinstance(config.get("init_lora_weights"), str):
        config["init_lora_weights"] = True
    return replace(run, config=config)


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
    return replace(model, adapter=parts, warnings=(*model.warnings, note, *_lost_biases(run)))


def _check_places(run: PeftRun, model: Checkpoint) -> None:
    """Refuses factors without a module, and modules that PEFT adapts (`check_target_module_exists`) without factors."""
    wanted = {f"{module}.weight" for module in run.modules}
    names: Collection[str] = with_tied_head(model).keys()
    naming = AS_STORED
    if not wanted <= {*names} and (memory := _in_memory(run, model)):
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


def _in_memory(run: PeftRun, model: Checkpoint) -> BaseInMemory | None:
    try:
        adapter = to_adapter(run.path, (run.path,), parse_config(run.config), run.adapter)
    except UnsupportedInput:
        return None  # written unchanged, or refused later
    return base_in_memory(model, with_tied_head(model), [adapter])


def _lost_biases(run: PeftRun) -> list[str]:
    """A warning about `lora_only` biases: Composer looks for them under a name of old PEFT versions, and drops them."""
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
        hint = f"{problem.hint}; `--adapter split` writes it separately"
        raise UnsupportedInput(problem.message, hint=hint) from problem


VERSIONED = ("transformers_version", "torch_dtype", "dtype", "architectures", "use_cache")
"""Fields that may differ between a base and its run without changing the results."""


def differences(stored: Mapping[str, Any], base: Mapping[str, Any]) -> list[str]:
    """A warning if the run's configuration differs from the base folder's in fields that both have.

    Raises:
        MalformedInput: the model types differ.
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
    """`generation_config.json` of the base, since a run does not contain one."""
    name = "generation_config.json"
    return {name: base.side_files[name]} if base and name in base.side_files else {}
