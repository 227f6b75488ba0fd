"""Which columns of a weight share a scale, where a checkpoint stores no index of groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from llmconv.errors import MalformedInput
from llmconv.quantized_weights.packed_weight import refuse
from llmconv.tensors import Array

WHOLE_ROW = -1
"""The `group_size` of one group per row."""


def group_size(config: Mapping[str, Any], *names: str) -> int | None:
    """The number of columns in a group, `WHOLE_ROW`, or None if it is not given.

    Args:
        config: a `quantization_config`.
        names: of the field, the first that is given counts.

    Raises:
        MalformedInput: neither a positive integer nor -1.
    """
    name = next((name for name in names if config.get(name) is not None), None)
    if name is None:
        return None
    size = config[name]
    if type(size) is not int or (size < 1 and size != WHOLE_ROW):
        raise MalformedInput(
            f"the model's `{name}` is {str(size)[:80]}",
            hint="it is a positive number such as 128, or -1 for one group per row; repair the `config.json`",
        )
    return size


def require_count(name: str, columns: int, count: int, size: int | None) -> None:
    """Checks the number of groups.

    Args:
        name: of the tensor of scales, for messages.
        columns: of the weight.
        count: number of groups that have a scale.
        size: columns in a group, see `group_size`; None if it is unknown.

    Raises:
        MalformedInput: the number of groups does not follow from their size.
    """
    if size is None:
        return
    wanted = 1 if size == WHOLE_ROW else -(-columns // size)
    if count != wanted:
        groups = "one group" if size == WHOLE_ROW else f"groups of {str(size)[:20]}"
        refuse(name, f"has scales of {count} groups, and {columns} columns in {groups} need {wanted}")


def groups_in_order(name: str, columns: int, count: int, size: int | None) -> Array:
    """int64 [columns]: the group of every column; neighbors share one, and the last group may be partial.

    Args:
        name, columns, count, size: as for `require_count`.

    Raises:
        MalformedInput: several groups of unknown size, or their number does not follow from their size.
    """
    if size is None and count > 1:
        refuse(name, f"has scales of {count} groups, and the `quantization_config` has no `group_size`")
    require_count(name, columns, count, size)
    return np.arange(columns) // (min(size, columns) if size and size > 0 else columns)
