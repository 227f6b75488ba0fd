"""Whether an adapter was trained on another model than the base it is merged into, as far as its files say so.

Shapes may fit by chance, so what fits is not proof. Only strong evidence is reported: a local path may have any name.
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
"""Words in the names of models that say of which architecture they are; not phi, falcon, granite, stablelm, internlm,
of which some are of Llama's."""

ALIASES = {"pythia": "gpt_neox", "smollm": "llama"}
"""Names of models whose `model_type` is called otherwise."""

LAYER = re.compile(r"^(?P<stem>.*?\.(?:layers|h|blocks|block)\.)(?P<number>\d+)\.(?P<rest>.+)$")
NOT_OF_THE_NAME = re.compile(r"[^a-z0-9]")


def warn_of_origin(base: Checkpoint, adapters: Iterable[Adapter], given: str) -> list[str]:
    """A line for every adapter that says that it belongs to another base.

    Args:
        base: what the adapters are merged into.
        adapters: opened.
        given: the base as the user named it.
    """
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
    """PEFT records the class of the base where no task type was given (`auto_mapping`)."""
    recorded = config.get("auto_mapping")
    library = str(recorded.get("parent_library")) if isinstance(recorded, dict) else ""
    match = re.fullmatch(r"transformers\.models\.(\w+)\.modeling_\w+", library)
    kind = str(base.get("model_type")).replace("-", "_")
    if not match or kind.startswith(match[1]) or match[1].startswith(kind):
        return None
    return f"its base was a {match[1]}, this one is a {kind}"


def _other_family(base: Mapping[str, Any], trained_on: str) -> str | None:
    """The name is of one architecture, and `model_type` is another."""
    # of a path only the last part is the model's name; of a hub id both are
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
    """Two hub ids whose models have names of which neither is part of the other."""
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
    """The hub id of a folder in the hub's cache: `models--org--name/snapshots/…`."""
    home = path.resolve().parent.parent.name
    return home.removeprefix("models--").replace("--", "/") if home.startswith("models--") else ""


def _plain(name: str) -> str:
    return NOT_OF_THE_NAME.sub("", Path(name.partition("@")[0]).name.lower())


def _fewer_layers(base: Checkpoint, adapter: Adapter, config: Mapping[str, Any]) -> str | None:
    """The adapter changes the first layers alone, in every kind of module, and its settings choose no layers."""
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
    """The numbers of the layers that have a module, by its name without the number."""
    found: dict[str, set[int]] = defaultdict(set)
    for name in names:
        if match := LAYER.match(name):
            found[f"{match['stem']}{{}}.{match['rest']}"].add(int(match["number"]))
    return dict(found)
