"""The groups of compressed-tensors' configs: how the weights of each module are stored.

Fields and defaults: `compressed_tensors/quantization/quant_args.py`. Which group a module belongs to: `match_targets`,
`_scheme_from_targets`: names come before patterns, those before classes, and in each the first in alphabetical order.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from time import thread_time
from typing import Any

import regex

from llmconv.errors import MalformedInput, UnsupportedInput
from llmconv.quantized_weights.column_groups import WHOLE_ROW, group_size
from llmconv.quantized_weights.packed_weight import refuse
from llmconv.quantized_weights.scaled import block_size

STRATEGIES = ("tensor", "channel", "group", "block")
LINEAR = "Linear"
"""The class of nearly all quantized modules."""

PATTERN = "re:"
PATTERN_LIMIT = 1000
"""Characters of a pattern."""

MATCH_SECONDS = 2.0
"""For all patterns and modules of a checkpoint."""

ORDERED_BY_GROUP = ("group", "dynamic", True)
"""Values of `actorder` that assign columns to groups by a stored index."""


@dataclass(frozen=True)
class WeightScheme:
    """How some weights are stored.

    Attributes:
        bits: of a code.
        kind: `int` or `float`.
        symmetric: there are no zero points.
        group: columns that share a scale, `WHOLE_ROW` where all of a row do; None for strategies without rows.
        block: rows and columns that share a scale; None for other strategies.
        indexed: the group of each column is stored.
    """

    bits: int
    kind: str
    symmetric: bool
    group: int | None
    block: tuple[int, int] | None
    indexed: bool


class WeightSchemes:
    """The scheme of every module.

    Args:
        config: a `quantization_config`.

    Raises:
        MalformedInput: a field of an unexpected kind, or one that contradicts another.
        UnsupportedInput: a strategy that is not read.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        schemes = {
            target: _scheme(scheme["weights"])
            for scheme in groups_of(config)
            if isinstance(scheme.get("weights"), Mapping)
            for target in _targets(scheme)
        }
        self._schemes = dict(sorted(schemes.items(), key=lambda item: (item[0].startswith(PATTERN), item[0])))
        self._seconds = MATCH_SECONDS

    def of(self, module: str) -> WeightScheme:
        """The scheme of a module.

        Args:
            module: its path.

        Raises:
            MalformedInput: no group, or several that differ, or a pattern that is invalid or takes too long.
        """
        for target, scheme in self._schemes.items():
            if self._matches(target, module):
                return scheme
        if LINEAR in self._schemes:
            return self._schemes[LINEAR]
        classes = {one for target, one in self._schemes.items() if not target.startswith(PATTERN) and "." not in target}
        choice = classes or set(self._schemes.values())
        if len(choice) != 1:
            refuse(module, f"is quantized, and {len(choice)} groups of `config_groups` may say how")
        return next(iter(choice))

    def _matches(self, target: str, module: str) -> bool:
        if not target.startswith(PATTERN):
            return target == module
        began = thread_time()
        try:
            return _compiled(target).match(module, timeout=max(self._seconds, 1e-3)) is not None
        except TimeoutError:
            raise _refused(target, "which takes too long to match") from None
        finally:
            self._seconds -= thread_time() - began


def groups_of(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The groups of a `quantization_config`."""
    groups = config.get("config_groups")
    yield from (group for group in (groups.values() if isinstance(groups, dict) else ()) if isinstance(group, dict))


def _targets(scheme: Mapping[str, Any]) -> Sequence[str]:
    targets = scheme.get("targets", [LINEAR])
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise _refused(targets, "which are not a list of names")
    return targets


def _scheme(weights: Mapping[str, Any]) -> WeightScheme:
    given = {name: value for name, value in weights.items() if value is not None}
    bits, kind, symmetric = given.get("num_bits", 8), given.get("type", "int"), given.get("symmetric", True)
    if type(bits) is not int or not 0 < bits <= 32 or kind not in ("int", "float") or type(symmetric) is not bool:
        raise _refused({"num_bits": bits, "type": kind, "symmetric": symmetric}, "which is no number format")
    size = group_size(given, "group_size")
    strategy = given.get("strategy") or ("tensor" if size is None else "channel" if size == WHOLE_ROW else "group")
    if strategy not in STRATEGIES:
        raise UnsupportedInput(
            f"the model is stored by compressed-tensors with the strategy `{str(strategy)[:40]}`, not supported",
            hint=f"supported are {', '.join(STRATEGIES)}; take the model it was quantized from",
        )
    if (strategy == "group") != (size is not None and size != WHOLE_ROW):
        raise _refused({"strategy": strategy, "group_size": size}, "which contradict each other")
    block = block_size(given.get("block_structure"))
    if strategy == "block" and block is None:
        raise _refused({"strategy": strategy}, "which needs a `block_structure`")
    group = {"channel": WHOLE_ROW, "group": size}.get(strategy)
    indexed = strategy == "group" and given.get("actorder") in ORDERED_BY_GROUP
    return WeightScheme(bits, kind, symmetric, group, block if strategy == "block" else None, indexed)


@lru_cache(maxsize=1 << 10)
def _compiled(target: str) -> Any:
    pattern = target.removeprefix(PATTERN)
    try:
        if len(pattern) > PATTERN_LIMIT:
            raise _refused(target, f"which has more than {PATTERN_LIMIT} characters")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about syntax that a later version may read differently
            return regex.compile(pattern)
    except (regex.error, RecursionError, OverflowError) as error:
        raise _refused(target, f"which is not a valid regular expression: {error}") from error


def _refused(value: Any, problem: str) -> MalformedInput:
    return MalformedInput(
        f"the `config_groups` of the model's `quantization_config` have {str(value)[:80]}, {problem}",
        hint="repair the `config.json`, or download it again",
    )
