"""Names the layer of a fault that an induction found: by its weights, its nodes, or its own results."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from llmconv.runtime.cache_names import layer_of
from llmconv.verify.layers.layer_checks import HIDDEN, NAME
from llmconv.verify.results.report import Check, Report, Where

AFTER = re.compile(rf"^{HIDDEN} after layer (\d+)$")


def narrowed(where: Where | None, report: Report) -> Where | None:
    """The location of a failure with the layer that it is in.

    Args:
        where: the location by the scenarios; None if nothing failed.
        report: its checks and the layers that are unlike the others of their kind.
    """
    if where is None:
        return None
    failed = [check for check in report.checks if check.verdict == "fail"]
    if layers := _of_weights(failed):
        return replace(where, layer=layers[0])
    if report.odd_layers:
        number, text = next(iter(report.odd_layers.items()))
        return replace(where, layer=number, text=f"{text}; {where.text}" if text not in where.text else where.text)
    found = {_number(check) for check in failed}
    numbers = sorted(at for at in found if at is not None)
    if not numbers:
        return where
    more = f" and {len(numbers) - 1} more" if numbers[1:] else ""
    return replace(where, layer=numbers[0], text=f"layer {numbers[0]}{more} by itself; {where.text}")


def _of_weights(failed: Sequence[Check]) -> list[int]:
    """Layers of the tensors that the audit of weights names."""
    names = [name for check in failed if check.name == "weights" for name in re.findall(r"`([^`]+)`", check.detail)]
    found = [re.search(r"(?:^|\.)(\d+)\.", name) for name in names]
    return [int(match[1]) for match in found if match]


def _number(check: Check) -> int | None:
    """The layer of a failed check of a single layer."""
    if not check.name.startswith(NAME):
        return None
    match = AFTER.match(check.output)
    return int(match[1]) if match else layer_of(check.output)
