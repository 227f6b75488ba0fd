"""What a Composer run tells of its writer, and what it holds that is not part of the model.

Layout (mosaicml/composer `core/state.py`): beside `model` and `integrations`, `state` holds what resuming needs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

from llmconv.convert.formats.composer.read import Run
from llmconv.convert.state_dicts.other_contents import phrases
from llmconv.files.pickles.machine import Stub
from llmconv.files.pickles.reader import TensorRef
from llmconv.tensors import LazyTensor

PARTS = {
    "optimizers": "the optimizer's state",
    "schedulers": "the learning rate schedulers",
    "algorithms": "the algorithms",
    "callbacks": "the callbacks",
    "scaler": "the gradient scaler",
    "train_metrics": "the training metrics",
    "eval_metrics": "the evaluation metrics",
    "dataset_state": "the data loader's position",
    "timestamp": "the time stamp",
    "rng": "the random number generators",
}
"""In the state, or (generators, and in old sharded runs the optimizer) next to it."""

KEPT = {"model", "integrations", "metadata", "run_name", "rank_zero_seed"}
VERSION = re.compile(r"[\w.+-]{1,60}")


def version(run: Run) -> str:
    """The writer, such as `composer 0.32.1, torch 2.13.0`; empty where the run does not tell."""
    metadata = run.branch("state", "metadata")
    told = {
        "composer": run.branch("state", "metadata", "composer_env_info").get("composer_version"),
        "torch": _text(metadata.get("torch_version")),
    }
    return ", ".join(
        f"{name} {text}" for name, text in told.items() if isinstance(text, str) and VERSION.fullmatch(text)
    )


def _text(value: Any) -> Any:
    """A `TorchVersion` is a string in a class of its own."""
    return value.args[0] if isinstance(value, Stub) and value.args else value


def dropped(run: Run) -> tuple[str, ...]:
    """What is in the run and not converted, one phrase each, with the size of its tensors; none of them is read."""
    parts = {key: value for key, value in run.content.items() if key != "state"} | run.branch("state")
    leaves = {str(key): [*_leaves(value)] for key, value in parts.items() if key not in KEPT}
    sizes = {PARTS.get(key, f"`{key[:40]}`"): sum(map(_nbytes, found)) for key, found in leaves.items() if found}
    return phrases(sizes | {_phrase(told): size for told, size in run.beside.items() if told.strip("`") not in KEPT})


def _phrase(told: str) -> str:
    """What a sharded run's part is called in a run of one file."""
    return PARTS.get(told.strip("`"), told)


def _leaves(value: Any) -> Iterator[Any]:
    """Everything but None in nested containers, each container once (a pickle may refer to one again and again)."""
    waiting, seen = [value], set()
    while waiting:
        item = waiting.pop()
        if isinstance(item, Mapping | list | tuple):
            if id(item) not in seen:
                seen.add(id(item))
                waiting.extend(item.values() if isinstance(item, Mapping) else item)
        elif item is not None:
            yield item


def _nbytes(leaf: Any) -> int:
    if isinstance(leaf, TensorRef):
        return prod(leaf.shape) * (leaf.dtype.itemsize if leaf.dtype else 1)
    return leaf.nbytes if isinstance(leaf, LazyTensor) else 0
