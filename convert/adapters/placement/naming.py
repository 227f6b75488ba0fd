"""Naming: how the tensors of a base are called while adapters are placed: as stored, or as in memory.

Most adapters have names that the files have, too. Where they do not, transformers knows what it calls stored tensors in
memory (`convert/models/names_in_memory.py`); then adapters are placed on those, and the result goes back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from llmconv.convert.adapters.placement.tensor_names import same_name


@dataclass(frozen=True)
class Naming:
    """How the tensors of a base are called.

    Attributes:
        spelled: how a name of an adapter is spelled here.
        stacks: name of a tensor in memory to the tensors of each expert that make it up, where the base has these.
    """

    spelled: Callable[[str], str] = same_name
    stacks: Mapping[str, tuple[tuple[str, ...], ...]] = field(default_factory=dict)


AS_STORED = Naming()
