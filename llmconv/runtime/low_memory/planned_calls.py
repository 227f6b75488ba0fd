"""PlannedCall: a call of a runner that is known in advance, so that several calls can run together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from llmconv.runtime.extra_inputs import ModelCall
from llmconv.runtime.runner import Cache
from llmconv.tensors import Array


@dataclass(frozen=True)
class PlannedCall:
    """One of several calls of a runner; arguments as in `Runner.prefill`.

    Attributes:
        past: the cache to continue, if it exists already.
        parent: index of the earlier call whose cache this call continues; None if it continues `past`.
        extras: values of extra inputs that do not have their defaults.
    """

    input_ids: Array
    attention_mask: Array
    position_ids: Array
    past: Cache | None = None
    parent: int | None = None
    extras: Mapping[str, Array] = field(default_factory=dict)

    @property
    def tokens(self) -> ModelCall:
        """The tokens of the call."""
        return ModelCall(self.input_ids, self.attention_mask, self.position_ids)

    @property
    def past_length(self) -> int:
        """Number of tokens before this call, padding included."""
        return int(self.attention_mask.shape[1] - self.input_ids.shape[1])
