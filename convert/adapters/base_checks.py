"""Detects adapters that were trained on another model than the base, by strong evidence in their files.

Matching shapes are not proof, and a local path may have any name.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llmconv.causal_lm import mtp_tensors
from llmconv.checkpoint import Checkpoint, open_checkpoint, read_json
from llmconv.convert.adapters.adapter import Adapter
from llmconv.convert.adapters.edits import Edits
from llmconv.convert.adapters.low_rank_sum import LoraProduct
from llmconv.convert.adapters.peft_file import CONFIG
from llmconv.errors import Inconclusive
from llmconv.tensors import BY_NAME, Array, LazyTensor, cast

# Words in model names that identify the architecture; not phi, falcon, granite, stablelm, internlm, some of which have
# Llama's
FAMILIES = (
    *("llama", "qwen", "gemma", "mistral", "mixtral", "gpt2", "gptj", "gpt_neox", "pythia", "bloom", "opt", "mpt"),
    *("olmo", "smollm", "mamba"),
)
ALIASES = {"pythia": "gpt_neox", "smollm": "llama"}  # model names to the word in their `model_type`
LAYER = re.compile(r"^(?P<stem>.*?\.(?:layers|h|blocks|block)\.)(?P<number>\d+)\.(?P<rest>.+)$")
NOT_OF_THE_NAME = re.compile(r"[^a-z0-9]")


def warn_of_origin(base: Checkpoint, adapters: Iterable[Adapter], given: str) -> list[str]:
    """A warning for every adapter with evidence of another base than `given`, the base as the user named it."""
    return [line for adapter in adapters if (line := _of_one(base, adapter, given))]


def _of_one(base: Checkpoint, adapter: Adapter, given: str) -> str | None:
    if adapter.settings.name != CONFIG or not adapter.settings.is_file():
        return None
    if adapter.path.resolve() == base.path.resolve():
        return (
            f"`{given}` is base and adapter: if its weights are merged already, as torchtune's, the update counts twice"
        )
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
    home = base.path.resolve().parent.parent.name  # in the Hugging Face cache: `models--org--name/snapshots/…`
    cached = home.removeprefix("models--").replace("--", "/") if home.startswith("models--") else ""
    candidates = [given, recorded if isinstance(recorded, str) else "", cached]
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


def _plain(name: str) -> str:
    return NOT_OF_THE_NAME.sub("", Path(name.partition("@")[0]).name.lower())


def _fewer_layers(base: Checkpoint, adapter: Adapter, config: Mapping[str, Any]) -> str | None:
    """The adapter changes only the first layers, in every kind of module, although its config selects no layers."""
    if _chooses_layers(config):
        return None
    heads = set(mtp_tensors(base, base.config))  # no adapter is trained on those of later tokens
    present, touched = (
        _layers(name for name in base if name not in heads),
        _layers(f"{module}." for module in adapter.pairs),
    )
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
        or (isinstance(targets, str) and targets != "all-linear")
    )


def _layers(names: Iterable[str]) -> dict[str, set[int]]:
    """Name of a module without the layer number to the numbers of its layers."""
    found: dict[str, set[int]] = defaultdict(set)
    for name in names:
        if match := LAYER.match(name):
            found[f"{match['stem']}{{}}.{match['rest']}"].add(int(match["number"]))
    return dict(found)


SAMPLE = 16  # maximum number of tensors of each group (changed, replaced, unchanged), evenly spread over the names
# Distances in representable numbers (ULP) that the histogram counts together
BINS = ((0, 0), (1, 1), (2, 2), (3, 4), (5, 8), (9, None))

ReadRows = Callable[[int, int], Array]


@dataclass(frozen=True)
class SampleCheck:
    """Result of `check_written`: the number of compared tensors and of their elements, and the differences."""

    tensors: int
    elements: int
    histogram: Mapping[str, int]  # distance from the rounded exact sum, in ULP, to the number of elements
    differing: tuple[str, ...]  # names of the tensors with an element that is not the rounded exact sum
    # names of the tensors that were compared with the formula that merged them, so that only the steps after it are
    # checked; the others were compared with an independent sum, or byte by byte
    trusted: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """Lines to print: the histogram unless all distances are 0, and the verdict last."""
        exact = not any(count for label, count in self.histogram.items() if label != "0")
        rows = [] if exact else [f"  {label:>4} ULP  {count:>14,}" for label, count in self.histogram.items()]
        head = f"checked {self.tensors} tensors, {self.elements:,} elements"
        if self.trusted:
            own = self.tensors - len(self.trusted)
            head += f": {own} against a sum of their own, {len(self.trusted)} against the formula that merged them"
        fine = "every element is the exact result, rounded"
        return [head, *rows, f"differs: {', '.join(self.differing)}" if self.differing else fine]

    def as_result(self) -> dict[str, Any]:
        return {
            "tensors": self.tensors,
            "elements": self.elements,
            "ulp": dict(self.histogram),
            "differing": list(self.differing),
            "trusted": list(self.trusted),
        }


def check_written(plan: Checkpoint, edits: Edits, output: Path, *, summed: bool) -> SampleCheck:
    """Compares a sample of a written folder with the sum in float64; Inconclusive if it has no tensor to compare.

    Sums of LoRA updates (`summed`) are computed here from the definition, not by the code that merged; other updates
    and combinations by their own formula in float64. Both are rounded as torch rounds: to float32, and from there to
    narrower types. float64 results are compared as float32, since their last bits depend on the order of summation.
    """
    written = open_checkpoint(output)
    counts, elements, differing = np.zeros(len(BINS), np.int64), 0, []
    changed = [name for name in plan if name in edits.changes]
    replaced = [name for name in plan if name not in edits.changes and edits.touches(name)]
    others = [name for name in plan if not edits.touches(name)]
    names = []
    for kind in (changed, replaced, others):  # the first, the last, and evenly spaced ones between
        few = min(SAMPLE, len(kind))
        names += [kind[round(index * (len(kind) - 1) / max(1, few - 1))] for index in range(few)]
    if not names:
        raise Inconclusive("the merged folder has no tensors", hint="check the base folder")
    for name in names:
        exact, tensor = _exact(plan, edits, name, summed), written[name]
        found = np.zeros(len(BINS), np.int64)
        for start, stop in tensor.blocks():
            rows = tensor.rows(start, stop)
            found += _distances(rows, exact(start, stop).reshape(rows.shape))
        counts, elements = counts + found, elements + int(found.sum())
        if found[1:].any():
            differing.append(name)
    labels = [f"{low}+" if high is None else str(low) if low == high else f"{low}-{high}" for low, high in BINS]
    trusted = tuple(name for name in names if name in edits.changes and not _is_plain(edits, name, summed))
    return SampleCheck(len(names), elements, dict(zip(labels, counts.tolist(), strict=True)), tuple(differing), trusted)


def _exact(plan: Checkpoint, edits: Edits, name: str, summed: bool) -> ReadRows:
    """Reads the expected rows: in float64, or in the stored type if nothing is computed."""
    if name not in edits.changes:
        return plan[name].rows
    if _is_plain(edits, name, summed):
        return _defined(edits.current(name), [one for one in edits.changes[name] if isinstance(one, LoraProduct)])
    return cast(plan[name], BY_NAME["float64"]).rows


def _is_plain(edits: Edits, name: str, summed: bool) -> bool:
    """Whether the tensor only gets a sum of LoRA products."""
    return summed and all(isinstance(change, LoraProduct) for change in edits.changes[name])


def _defined(weight: LazyTensor, changes: Sequence[LoraProduct]) -> ReadRows:
    """Rows of W + Σ s·B·A (of the transposed product for weights stored in×out), from the definition."""
    factors = [(change, change.a.read().astype(np.float64), change.b.read().astype(np.float64)) for change in changes]

    def rows(start: int, stop: int) -> Array:
        total = weight.rows(start, stop).astype(np.float64).reshape(stop - start, -1)
        for change, a, b in factors:
            product = a.T[start:stop] @ b.T if change.transposed else b[start:stop] @ a
            total += change.scale * product
        return total

    return rows


TIE = 2.0**-43
"""A millionth of the last place of float32: where a result is nearer than that to the middle of two numbers, as one of
some ten million is, the order of the sum in float64 decides; both are the exact result, rounded."""


def _distances(found: Array, exact: Array) -> Array:
    """The number of elements per bin of `BINS`, by their distance from the exact ones."""
    if found.dtype.kind not in "fV":
        steps: Array = (found != exact).astype(np.int64).reshape(-1)
    elif exact.dtype == np.float64:
        kind = np.dtype(np.float32) if found.dtype.itemsize == 8 else found.dtype
        with np.errstate(over="ignore"):
            places = _ordered(found.astype(kind))
            steps = np.abs(places - _ordered(exact.astype(np.float32).astype(kind)))
            for share in (1 - TIE, 1 + TIE) if (steps == 1).any() else ():
                steps[(steps == 1) & (places == _ordered((exact * share).astype(np.float32).astype(kind)))] = 0
    else:
        steps = np.abs(_ordered(found) - _ordered(exact))
    edges = [low for low, _ in BINS]
    return np.bincount(np.searchsorted(edges, steps.reshape(-1), side="right") - 1, minlength=len(BINS))


def _ordered(values: Array) -> Array:
    """Integers in the order of the floats, one apart for neighboring floats; both zeros are 0."""
    bits = np.ascontiguousarray(values).view(f"i{values.dtype.itemsize}").astype(np.int64)
    lowest = -(1 << (8 * values.dtype.itemsize - 1))
    return np.where(bits < 0, lowest - bits, bits)
