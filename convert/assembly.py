"""A Checkpoint of a state dict in Hugging Face names, or its refusal: nothing may stay randomly initialized.

Finds the prefix of the names in a state dict of a wrapped model, or of one without a head:
`lit.model.transformer.wte.weight` has the prefix `lit.model.`; `wte.weight` of a GPT2Model lacks `transformer.`, which
is added as transformers adds it when it loads (`base_model_prefix`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmconv.checkpoint import (
    ADAPTER_CONFIG,
    Checkpoint,
    read_json,
    read_side_files,
    refuse_second_names,
    refuse_unmerged,
    unmerged,
)
from llmconv.convert.models.completeness import BUFFERS, as_loaded
from llmconv.convert.models.config_file import causal_lm_config, other_class_config
from llmconv.convert.models.mpt_config import enlarged
from llmconv.convert.models.transformers_source import ModelNames, causal_lm_classes, model_names
from llmconv.convert.state_dicts.files import EMBEDDING, Leaf, StateFile, refuse_objects, refuse_quantized, select
from llmconv.convert.tokenizers import read_tokenizer
from llmconv.errors import MalformedInput, UnsupportedInput, UsageProblem, listing
from llmconv.model_code import AUTO_MAP
from llmconv.tensors import LazyTensor

# Names of a LayerNorm's parameters in models that came from TensorFlow (`LayerNorm.gamma`)
OLD_NORM = {"gamma": "weight", "beta": "bias"}
AROUND = {
    **dict.fromkeys(("optimizer", "optimizer_states", "optimizer_state_dict"), "the optimizer's state"),
    **dict.fromkeys(("scheduler", "lr_schedulers", "scheduler_state_dict"), "the learning rate schedule"),
    "callbacks": "the callbacks' state",
    "loops": "the training loops' state",
    "hyper_parameters": "the hyper-parameters",
}


def config_folder(path: Path) -> Path:
    return path if path.is_dir() else path.parent


def stored_config(path: Path) -> dict[str, Any]:
    """`config.json` in or next to `path`, or empty; those of 2019 without `model_type` get that of their class."""
    file = config_folder(path) / "config.json"
    config = read_json(file) if file.is_file() else {}
    classes = config.get("architectures")
    if "model_type" in config or not isinstance(classes, list):
        return config
    known = causal_lm_classes().items()
    kinds = [kind for kind, name in known if classes[:1] == [name] and model_names(kind).embedding]
    return {**config, "model_type": kinds[0]} if len(kinds) == 1 else config


def side_files_of(path: Path, tokenizer: Path | None) -> dict[str, bytes]:
    """The side files in or next to `path`; see `with_tokenizer`."""
    return with_tokenizer(read_side_files(config_folder(path)), tokenizer)


NOT_OF_TOKENIZERS = (
    *("generation_config.json", "preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json"),
)


def with_tokenizer(files: Mapping[str, bytes], tokenizer: Path | None) -> dict[str, bytes]:
    """Side files with the user's `tokenizer` in place of theirs, if it is given."""
    if tokenizer is None:
        return dict(files)
    return {name: files[name] for name in files if name in NOT_OF_TOKENIZERS} | read_tokenizer(tokenizer)


def contents_around(file: StateFile) -> tuple[str, ...]:
    """The other contents of a file with a state dict, one phrase each."""
    phrases = [AROUND.get(str(key), "") for key, value in file.around.items() if value not in (None, {}, [])]
    return tuple(dict.fromkeys(phrase for phrase in phrases if phrase))


DEEPEST = 2  # how far below the top of a file averages lie: `callbacks`, the callback's name, `ema_state_dict`


def second_models(file: StateFile) -> list[str]:
    """A warning if the tensors of the model are in the file a second time: averages over training steps, usually.

    They are under `ema`, `model_ema`, `state_dict_ema` and the like, directly or below (in the state of Lightning's
    callbacks); without names in the `shadow_params` of torch-ema and diffusers. Lightning's `WeightAveraging` puts the
    averages under `state_dict`, and what it averages under `current_model_state`. Shapes are compared, as names may
    have other prefixes.
    """

    def shapes(values: Iterable[Any]) -> Counter[tuple[int, ...]]:
        return Counter(leaf.shape for leaf in values if isinstance(leaf, Leaf))

    own, found = shapes(file.state.values()), list[str]()
    waiting = [(str(key), value, 0) for key, value in file.around.items() if "optim" not in str(key)]
    while waiting and own:
        place, part, depth = waiting.pop()
        parts = part.values() if isinstance(part, Mapping) else part if isinstance(part, list | tuple) else ()
        if own <= shapes(parts) and part != file.state:
            found.append(place)
        if isinstance(part, Mapping) and depth < DEEPEST:
            waiting += [(f"{place}.{name}", inner, depth + 1) for name, inner in part.items()]
    if not found:
        return []
    which = "one of them is an average over training steps, usually; to convert another, save it alone as a state dict"
    return [f"`{file.path.name}` contains the model again under {listing(found)}, which is not converted: {which}"]


def assemble(
    file: StateFile,
    format: str,
    given: Mapping[str, Any],
    tokenizer: Path | None,
    version: str = "",
    stored: Mapping[str, Any] | None = None,
) -> Checkpoint:
    """The whole model in `file`, with any one prefix; InputRefused without a config, or if it describes another model.

    `given` are the user's fields (`drop` leaves out other tensors), `tokenizer` is the user's, `version` the writer's;
    `stored` is the run's configuration, None for that in or next to the file.
    """
    source, warnings = file.path.name, second_models(file)
    fields = {name: value for name, value in given.items() if name != "drop"}
    home = file.home or file.path
    stored = stored_config(home) if stored is None else stored
    other = other_class_config(stored, fields, file.state, warnings, drop=bool(given.get("drop")))
    settings = other or causal_lm_config(stored, fields, source, warnings)
    refuse_quantized(file.state, source)
    refuse_objects(file.state, source)
    if settings.get("quantization_config"):
        raise UnsupportedInput(
            f"the configuration of `{source}` declares it quantized",
            hint="give the weights from before quantization, and a configuration without `quantization_config`",
        )
    refuse_unmerged(file.state, settings, source)
    if AUTO_MAP in settings:
        tensors, dropped = select(file.state, file.tensor, source, warnings, buffers=True), list[str]()
    else:
        tensors, dropped = _native_tensors(file, settings, warnings, drop=bool(given.get("drop")), every=bool(other))
    if not other and AUTO_MAP not in settings:
        if settings["model_type"] == "mpt":
            tensors = enlarged(tensors, {**stored, **fields}, source)
        settings = as_loaded(tensors, settings)
    writer = settings.get("transformers_version")  # usually that which wrote the weights
    version = version or (f"transformers {writer[:20]}" if isinstance(writer, str) else "")
    more = (tuple(warnings), version, file.shards, (*contents_around(file), *dropped))
    return Checkpoint(file.path, format, tensors, settings, side_files_of(home, tokenizer), *more)


def _native_tensors(
    file: StateFile, settings: Mapping[str, Any], warnings: list[str], *, drop: bool, every: bool
) -> tuple[dict[str, LazyTensor], list[str]]:
    """The tensors in transformers' names (`every`: as `map_names`), and a phrase for each kind of those left out."""
    source = file.path.name
    counts: Counter[str] = Counter()
    state: dict[str, Any] = {}  # without buffers that the model recomputes
    for name, leaf in file.state.items():
        rank = len(leaf.shape) if isinstance(leaf, Leaf) else -1
        if kind := next((kind for kind, sign, ranks in BUFFERS if sign.search(name) and rank in ranks), None):
            counts[kind] += 1
        else:
            state[name] = leaf
    dropped = [f"{count} {kind}, which the model computes" for kind, count in counts.items()]
    stored = select(state, file.tensor, source, warnings)
    names, outside, added = map_names(list(stored), model_names(str(settings["model_type"])), source, every=every)
    tensors = {}
    for name, target in names.items():
        stem, dot, last = target.rpartition(".")
        tensors[stem + dot + OLD_NORM.get(last, last)] = stored[name]
    if not drop:
        refuse_second_names(outside, names, source)
    dropped += dropped_outside(outside, source, drop=drop)
    if added:
        warnings.append(f"added `{added}` to the names, which are those of the model without its head")
    return tensors, dropped


def dropped_outside(outside: Sequence[str], source: str, *, drop: bool) -> list[str]:
    """A phrase about the tensors outside the model, if any; UnsupportedInput unless they may be dropped."""
    if outside and not drop:
        raise UnsupportedInput(
            f"`{source}` has {len(outside)} unexpected keys outside the model: {listing(outside)}",
            hint="`--drop` leaves them out, if the model computes its logits without them",
        )
    return [f"{len(outside)} tensors outside the model: {listing(outside)}"] if outside else []


def map_names(
    stored: Sequence[str], model: ModelNames, source: str, *, every: bool = False
) -> tuple[dict[str, str], list[str], str]:
    """Stored names to Hugging Face's by the only prefix, those outside it, and the prefix that a base model lacks.

    With `every`, all names with the prefix are the model's, as those of a classifier's head, or of a part for images.
    Raises MalformedInput without an embedding, UnsupportedInput for several models.
    """
    whole: dict[str, None] = {}  # the prefixes of whole models, and those of base models
    base_only: dict[str, None] = {}
    for name in stored:
        embedding = model.embedding
        if not embedding and EMBEDDING.search(name):  # of an unknown model: from the last `base` on
            start = f".{name}".rfind(f".{model.base}.")
            embedding = name[start:] if start >= 0 else f"{model.base}.{name}"
        short = embedding.removeprefix(f"{model.base}.")
        if _ends_with(name, embedding):
            whole[name.removesuffix(embedding)] = None
        elif _ends_with(name, short):
            base_only[name.removesuffix(short)] = None
    if every and not whole:
        from llmconv.convert.state_dicts.distributed import prefix_of  # noqa: PLC0415 - of few models

        outer = prefix_of(stored)
        own = {name: name.removeprefix(outer) for name in stored if name.startswith(outer)}
        return own, [name for name in stored if name not in own], ""
    if not (found := [*(whole or base_only)]):
        raise MalformedInput(
            f"missing key `{model.embedding or 'embed_tokens.weight'}` in `{source}`; it begins with {listing(stored)}",
            hint="the configuration belongs to another model, or the checkpoint is partial",
        )
    if len(found) > 1:
        raise UnsupportedInput(
            f"`{source}` contains {len(found)} models, with the prefixes {listing(found)}",
            hint="save the `state_dict()` of one model alone",
        )
    prefix, added = found[0], "" if whole else f"{model.base}."
    names: dict[str, str] = {}
    outside: list[str] = []
    for name in stored:
        rest = name.removeprefix(prefix)
        target = rest if rest.startswith(model.roots[1:]) else added + rest
        if not name.startswith(prefix) or not (every or target.startswith(model.roots)):
            outside.append(name)
        else:
            names[name] = target
    return names, outside, added


def _ends_with(name: str, ending: str) -> bool:
    return bool(ending) and (name == ending or name.endswith(f".{ending}"))


OPTIONS = ("base", "adapter")


def without_adapter(options: Mapping[str, Any], source: str) -> None:
    """Raises UsageProblem for options that have no meaning for a run without PEFT."""
    if given := [name for name in OPTIONS if options.get(name)]:
        raise UsageProblem(f"`--{given[0]}` is given, but `{source}` contains no adapter", hint="leave it out")


def opened_with_adapter(
    tensors: dict[str, LazyTensor],
    path: Path,
    options: Mapping[str, Any],
    open_model: Callable[[dict[str, LazyTensor], Checkpoint | None], Checkpoint],
    stored: Mapping[str, Any] | None = None,
) -> Checkpoint:
    """The model, with its adapter if it is a PeftModel's; see `peft_runs.with_adapter`.

    `stored` is the adapter's config; None: it is in the folder or above (else MalformedInput).
    """
    if not stored and not any(".lora_" in name for name in tensors) and not unmerged(tensors, {}):
        without_adapter(options, path.name)
        return open_model(tensors, None)
    from llmconv.convert.peft_runs import find_adapter, with_adapter  # noqa: PLC0415 - no other run needs them

    if stored is None:
        homes = [path, *path.absolute().parents[:2]]
        file = next((home / ADAPTER_CONFIG for home in homes if (home / ADAPTER_CONFIG).is_file()), None)
        stored = read_json(file) if file else {}
    return with_adapter(find_adapter(stored, tensors, path), options, open_model)


def assembled_run(
    file: StateFile,
    format: str,
    options: Mapping[str, Any],
    tokenizer: Path | None,
    adapter: Mapping[str, Any] | None = None,
) -> Checkpoint:
    """The model of a state dict, with its adapter if it is a PeftModel's; arguments and errors as in `assemble`.

    `adapter` is the adapter's config; None: it is in the folder or above.
    """
    given = {name: value for name, value in options.items() if name not in OPTIONS}
    settings = {**stored_config(file.home or file.path), **given}
    if not any(".lora_" in name for name in file.state) and not unmerged(file.state, settings):
        without_adapter(options, file.path.name)
        return assemble(file, format, given, tokenizer)

    def open_model(tensors: dict[str, LazyTensor], base: Checkpoint | None) -> Checkpoint:
        side_files = {**(base.side_files if base else {}), **side_files_of(file.home or file.path, tokenizer)}
        if not tensors:
            return Checkpoint(file.path, format, {}, {}, side_files, shards=file.shards)
        around = {key: value for key, value in file.around.items() if value != file.state}  # not a second model
        part = replace(file, state=tensors, tensor=lambda name, leaf: leaf, around=around)
        notes: list[str] = []
        own = config_of_run(stored_config(file.home or file.path), base, notes)
        model = assemble(part, format, given, tokenizer, stored=own)
        return replace(model, side_files=side_files, warnings=(*notes, *model.warnings))

    warnings: list[str] = []
    tensors = select(file.state, file.tensor, file.path.name, warnings)
    opened = opened_with_adapter(tensors, file.path, options, open_model, adapter)
    return replace(opened, warnings=(*warnings, *opened.warnings))


VERSIONED = ("transformers_version", "torch_dtype", "dtype", "architectures", "use_cache")
"""Fields that may differ between a base and its run without changing the results."""


def config_of_run(stored: Mapping[str, Any], base: Checkpoint | None, warnings: list[str]) -> dict[str, Any]:
    """The run's `stored` config, with a warning about fields that differ from the base's; the base's if it has none."""
    if base is None:
        return dict(stored)
    if not stored.get("model_type"):
        return dict(base.config)
    warnings += _differences(stored, base.config)
    return dict(stored)


def _differences(stored: Mapping[str, Any], base: Mapping[str, Any]) -> list[str]:
    """A warning if shared fields of the run's and the base folder's config differ; MalformedInput for `model_type`."""
    differing = sorted(name for name in stored.keys() & base.keys() if stored[name] != base[name])
    if "model_type" in differing:
        raise MalformedInput(
            f"the run is of a `{stored['model_type']}`, the base folder of a `{base['model_type']}`",
            hint="give the model that training started from with `--base`",
        )
    named = [name for name in differing if name not in VERSIONED and not name.startswith("_")]
    return [f"the run's configuration differs from the base's in {listing(named)}; the run's is used"] if named else []
