"""The versions that wrote a Composer run, and its parts that are not converted.

Layout (mosaicml/composer `core/state.py`): `state` holds `model`, `integrations`, and all that resuming needs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

from llmconv.convert.formats.composer.read import ComposerRun
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
"""Keys in the state, or (generators, and in old sharded runs the optimizer) next to it."""

KEPT = {"model", "integrations", "metadata", "run_name", "rank_zero_seed"}
VERSION = re.compile(r"[\w.+-]{1,60}")


def version(run: ComposerRun) -> str:
    """The versions, such as `composer 0.32.1, torch 2.13.0`; empty if unknown."""
    metadata = run.branch("state", "metadata")
    versions = {
        "composer": run.branch("state", "metadata", "composer_env_info").get("composer_version"),
        "torch": _text(metadata.get("torch_version")),
    }
    return ", ".join(
        f"{name} {text}" for name, text in versions.items() if isinstance(text, str) and VERSION.fullmatch(text)
    )


def _text(value: Any) -> Any:
    """The text of a `TorchVersion`, torch's own class of strings."""
    return value.args[0] if isinstance(value, Stub) and value.args else value


def dropped(run: ComposerRun) -> tuple[str, ...]:
    """The parts that are not converted, one phrase each, with the size of their tensors; none is read."""
    parts = {key: value for key, value in run.content.items() if key != "state"} | run.branch("state")
    leaves = {str(key): [*_leaves(value)] for key, value in parts.items() if key not in KEPT}
    sizes = {PARTS.get(key, f"`{key[:40]}`"): sum(map(_nbytes, found)) for key, found in leaves.items() if found}
    # a sharded run has the same parts under quoted keys
    others = {
        PARTS.get(key.strip("`"), key): size for key, size in run.other_parts.items() if key.strip("`") not in KEPT
    }
    return phrases(sizes | others)


def _leaves(value: Any) -> Iterator[Any]:
    """Everything except None in nested containers, each container once (a pickle may refer to one many times)."""
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
