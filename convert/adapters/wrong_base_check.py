"""Detects adapters that were trained on another model than the base, by strong evidence in their files.

Matching shapes are not proof, and a local path may have any name.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from llmconv.checkpoint import Checkpoint, read_json
from llmconv.convert.adapters.adapter import Adapter
from llmconv.convert.adapters.peft_tensors import CONFIG

FAMILIES = (
    *("llama", "qwen", "gemma", "mistral", "mixtral", "gpt2", "gptj", "gpt_neox", "pythia", "bloom", "opt", "mpt"),
    *("olmo", "smollm", "mamba"),
)
"""Words in model names that identify the architecture; not phi, falcon, granite, stablelm, internlm, some of which have
Llama's."""

ALIASES = {"pythia": "gpt_neox", "smollm": "llama"}
"""Model names to the word in their `model_type`."""

LAYER = re.compile(r"^(?P<stem>.*?\.(?:layers|h|blocks|block)\.)(?P<number>\d+)\.(?P<rest>.+)$")
NOT_OF_THE_NAME = re.compile(r"[^a-z0-9]")


def warn_of_origin(base: Checkpoint, adapters: Iterable[Adapter], given: str) -> list[str]:
    """A warning for every adapter with evidence of another base than `given`, the base as the user named it."""
    return [line for adapter in adapters if (line := _of_one(base, adapter, given))]


def _of_one(base: Checkpoint, adapter: Adapter, given: str) -> str | None:
    if adapter.settings.name != CONFIG or not adapter.settings.is_file():
        return None
    config = read_json(adapter.settings)
    trained_on = config.get("base_model_name_or_path")
    trained_on = trained_on if isinstance(trained_on, str) else ""
    reason = (
        _other_class(base.config, config)
        or _other_family(base.config, trained_on)
        or _other_name(base, trained_on, given)
        or _fewer_layers(base, adapter, config)
    )
    if not reason:
        return None
    names = f"`{adapter.name}` was trained on `{trained_on}`" if trained_on else f"`{adapter.name}`"
    return f"{names}, and is merged into `{given}`, which seems to be another model: {reason}"


def _other_class(base: Mapping[str, Any], config: Mapping[str, Any]) -> str | None:
    """The base's class recorded by PEFT if no task type was given (`auto_mapping`) is of another architecture."""
    recorded = config.get("auto_mapping")
    library = str(recorded.get("parent_library")) if isinstance(recorded, dict) else ""
    match = re.fullmatch(r"transformers\.models\.(\w+)\.modeling_\w+", library)
    kind = str(base.get("model_type")).replace("-", "_")
    if not match or kind.startswith(match[1]) or match[1].startswith(kind):
        return None
    return f"its base was a {match[1]}, this one is a {kind}"


def _other_family(base: Mapping[str, Any], trained_on: str) -> str | None:
    """The name of the training base is of another architecture than `model_type`."""
    # only the last part of a path is the model's name, but both parts of a hub id
    name = trained_on if _is_hub_id(trained_on) else Path(trained_on).name
    named, own = _families(name), _families(str(base.get("model_type")))
    if not named or not own or named & own:
        return None
    return f"its base was called a {' '.join(sorted(named))}, this one is a {base.get('model_type')}"


def _families(name: str) -> set[str]:
    plain = name.lower().replace("-", "_")
    words = {word for word in FAMILIES if re.search(rf"(?:^|[^a-z]|tiny|open|code){word}(?![a-z])", plain)}
    return {ALIASES.get(word, word) for word in words}


def _other_name(base: Checkpoint, trained_on: str, given: str) -> str | None:
    """Both are hub ids, and neither model name is part of the other."""
    recorded = base.config.get("_name_or_path")
    candidates = [given, recorded if isinstance(recorded, str) else "", _of_cache(base.path)]
    ids = [name for name in candidates if _is_hub_id(name) and not Path(name).exists()]
    names = {_plain(name) for name in (*candidates, base.path.absolute().name) if name}
    wanted = _plain(trained_on)
    if not ids or not _is_hub_id(trained_on) or Path(trained_on).exists():
        return None
    if any(wanted in name or name in wanted for name in names if name):
        return None
    return f"its name is `{ids[0]}`"


def _is_hub_id(name: str) -> bool:
    return bool(re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(?:@[\w./-]+)?", name))


def _of_cache(path: Path) -> str:
    """The hub id of a folder in the Hugging Face cache: `models--org--name/snapshots/…`."""
    home = path.resolve().parent.parent.name
    return home.removeprefix("models--").replace("--", "/") if home.startswith("models--") else ""


def _plain(name: str) -> str:
    return NOT_OF_THE_NAME.sub("", Path(name.partition("@")[0]).name.lower())


def _fewer_layers(base: Checkpoint, adapter: Adapter, config: Mapping[str, Any]) -> str | None:
    """The adapter changes only the first layers, in every kind of module, although its config selects no layers."""
    if _chooses_layers(config):
        return None
    present, touched = _layers(base), _layers(f"{module}." for module in adapter.pairs)
    counts = set()
    for module, numbers in touched.items():
        there = {number for name in present if name.startswith(module) for number in present[name]}
        if not there or numbers != set(range(max(numbers) + 1)) & there or max(there) <= max(numbers):
            return None
        counts.add((max(numbers) + 1, max(there) + 1))
    if len(counts) != 1:
        return None
    count, depth = counts.pop()
    return f"it changes the first {count} of {depth} layers"


def _chooses_layers(config: Mapping[str, Any]) -> bool:
    chosen = [config.get(name) for name in ("layers_to_transform", "exclude_modules", "layer_replication")]
    targets = config.get("target_modules")
    named = targets if isinstance(targets, list) else [str(targets)]
    return (
        any(value not in (None, [], "") for value in chosen)
        or any(re.search(r"(?:^|\.)\d+(?:\.|$)", str(name)) for name in named)
        or _is_pattern(targets)
    )


def _is_pattern(targets: Any) -> bool:
    return isinstance(targets, str) and targets != "all-linear"


def _layers(names: Iterable[str]) -> dict[str, set[int]]:
    """Name of a module without the layer number to the numbers of its layers."""
    found: dict[str, set[int]] = defaultdict(set)
    for name in names:
        if match := LAYER.match(name):
            found[f"{match['stem']}{{}}.{match['rest']}"].add(int(match["number"]))
    return dict(found)
