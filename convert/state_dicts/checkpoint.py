"""Turns a state dict in Hugging Face names into a Checkpoint, or refuses it: nothing may stay randomly initialized.

Finds the prefix of the names in a state dict of a wrapped model, or of one without a head:
`lit.model.transformer.wte.weight` has the prefix `lit.model.`; `wte.weight` of a GPT2Model lacks `transformer.`, which
is added as transformers adds it when it loads (`base_model_prefix`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmconv.checkpoint import Checkpoint, read_json, read_side_files
from llmconv.convert.models.blueprint.transformers_source import ModelNames, causal_lm_classes, model_names
from llmconv.convert.models.completeness import BUFFERS, Leaf, as_loaded, select
from llmconv.convert.models.config_file import causal_lm_config
from llmconv.convert.models.mpt_config import enlarged
from llmconv.convert.state_dicts.files import EMBEDDING, StateFile, refuse_objects, refuse_quantized
from llmconv.convert.tokenizers import read_tokenizer
from llmconv.errors import MalformedInput, UnsupportedInput, listing
from llmconv.model_code import AUTO_MAP
from llmconv.tensors import LazyTensor

OLD_NORM = {"gamma": "weight", "beta": "bias"}
"""Names of a LayerNorm's parameters in models that came from TensorFlow (`LayerNorm.gamma`)."""

AROUND = {
    "optimizer": "the optimizer's state",
    "optimizer_states": "the optimizer's state",
    "optimizer_state_dict": "the optimizer's state",
    "scheduler": "the learning rate schedule",
    "lr_schedulers": "the learning rate schedule",
    "scheduler_state_dict": "the learning rate schedule",
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
    """Tokenizer and generation files in or next to `path`; `tokenizer` replaces the tokenizer if it is given."""
    found = read_side_files(config_folder(path))
    if tokenizer is None:
        return found
    return {name: found[name] for name in found if name == "generation_config.json"} | read_tokenizer(tokenizer)


def contents_around(file: StateFile) -> tuple[str, ...]:
    """The other contents of a file with a state dict, one phrase each."""
    phrases = [AROUND.get(str(key), "") for key, value in file.around.items() if value not in (None, {}, [])]
    return tuple(dict.fromkeys(phrase for phrase in phrases if phrase))


def assemble(
    file: StateFile, format: str, given: Mapping[str, Any], tokenizer: Path | None, version: str = ""
) -> Checkpoint:
    """The whole model in `file`, with any one prefix; InputRefused without a config, or if it describes another model.

    `given` are the user's fields (`drop` leaves out other tensors), `tokenizer` is the user's, `version` the writer's.
    """
    source, warnings = file.path.name, list[str]()
    fields = {name: value for name, value in given.items() if name != "drop"}
    stored = stored_config(file.path)
    settings = causal_lm_config(stored, fields, source, warnings)
    refuse_quantized(file.state, source)
    refuse_objects(file.state, source)
    if settings.get("quantization_config"):
        raise UnsupportedInput(
            f"the configuration of `{source}` declares it quantized",
            hint="give the weights from before quantization, and a configuration without `quantization_config`",
        )
    if lora := [name for name in file.state if "lora_" in name]:
        raise UnsupportedInput(
            f"`{source}` holds LoRA matrices that are not merged: {listing(lora)}",
            hint="merge them where it was trained, or save the adapter with PEFT and use `llmconv merge-lora`",
        )
    if AUTO_MAP in settings:
        tensors, dropped = select(file.state, file.tensor, source, warnings, buffers=True), list[str]()
    else:
        tensors, dropped = _native_tensors(file, settings, warnings, drop=bool(given.get("drop")))
        if settings["model_type"] == "mpt":
            tensors = enlarged(tensors, {**stored, **fields}, source)
        settings = as_loaded(tensors, settings)
    return Checkpoint(
        file.path,
        format,
        tensors,
        settings,
        side_files_of(file.path, tokenizer),
        tuple(warnings),
        version or _writer(settings),
        file.shards,
        (*contents_around(file), *dropped),
    )


def _native_tensors(
    file: StateFile, settings: Mapping[str, Any], warnings: list[str], *, drop: bool
) -> tuple[dict[str, LazyTensor], list[str]]:
    """The tensors in transformers' names, and a phrase for each kind of those that are left out."""
    source = file.path.name
    state, dropped = _without_buffers(file.state)
    stored = select(state, file.tensor, source, warnings)
    mapping = map_names(list(stored), model_names(str(settings["model_type"])), source)
    tensors = {_new_style(target): stored[name] for name, target in mapping.names.items()}
    dropped += _outside(mapping, source, drop=drop)
    if mapping.added:
        warnings.append(f"added `{mapping.added}` to the names, which are those of the model without its head")
    return tensors, dropped


def _writer(config: Mapping[str, Any]) -> str:
    """The version of transformers in the configuration, usually the one that wrote the weights."""
    version = config.get("transformers_version")
    return f"transformers {version[:20]}" if isinstance(version, str) else ""


def _without_buffers(state: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The state dict without buffers that the model recomputes, and one phrase per kind of them."""
    counts: Counter[str] = Counter()
    kept: dict[str, Any] = {}
    for name, leaf in state.items():
        if kind := next((kind for kind, sign, ranks in BUFFERS if sign.search(name) and _rank(leaf) in ranks), None):
            counts[kind] += 1
        else:
            kept[name] = leaf
    return kept, [f"{count} {kind}, which the model computes" for kind, count in counts.items()]


def _rank(leaf: Any) -> int:
    return len(leaf.shape) if isinstance(leaf, Leaf) else -1


def _new_style(name: str) -> str:
    stem, dot, last = name.rpartition(".")
    return stem + dot + OLD_NORM.get(last, last)


def _outside(mapping: NameMapping, source: str, *, drop: bool) -> list[str]:
    if not mapping.outside:
        return []
    if not drop:
        raise UnsupportedInput(
            f"`{source}` has {len(mapping.outside)} unexpected keys outside the model: {listing(mapping.outside)}",
            hint="`--drop` leaves them out, if the model computes its logits without them",
        )
    return [f"{len(mapping.outside)} tensors outside the model: {listing(mapping.outside)}"]


@dataclass(frozen=True)
class NameMapping:
    """Stored names to Hugging Face's without `prefix`, or `outside`; `added`: a prefix that base models lack."""

    names: dict[str, str]
    outside: tuple[str, ...]
    prefix: str
    added: str


def map_names(stored: Sequence[str], model: ModelNames, source: str) -> NameMapping:
    """Maps names by the only prefix; MalformedInput without an embedding, UnsupportedInput for several models."""
    whole, base_only = _prefixes(stored, model)
    if not (found := whole or base_only):
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
        if not name.startswith(prefix) or not target.startswith(model.roots):
            outside.append(name)
        else:
            names[name] = target
    return NameMapping(names, tuple(outside), prefix, added)


def _prefixes(stored: Iterable[str], model: ModelNames) -> tuple[list[str], list[str]]:
    """The prefixes of whole models, and those of base models."""
    whole: dict[str, None] = {}
    base_only: dict[str, None] = {}
    for name in stored:
        embedding = model.embedding or _embedding(name, model.base)
        short = embedding.removeprefix(f"{model.base}.")
        if _ends_with(name, embedding):
            whole[name.removesuffix(embedding)] = None
        elif _ends_with(name, short):
            base_only[name.removesuffix(short)] = None
    return list(whole), list(base_only)


def _ends_with(name: str, ending: str) -> bool:
    return bool(ending) and (name == ending or name.endswith(f".{ending}"))


def _embedding(name: str, base: str) -> str:
    """The embedding's name for a model whose names are unknown: from the last `base` on, if it looks like one."""
    if not EMBEDDING.search(name):
        return ""
    start = f".{name}".rfind(f".{base}.")
    return name[start:] if start >= 0 else f"{base}.{name}"
