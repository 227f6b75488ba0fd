"""PlannedCall: a call that is known before it is made, so that many can be made side by side."""

from __future__ import annotations

from dataclasses import dataclass

from llmconv.runtime.runner import Cache
from llmconv.tensors import Array


@dataclass(frozen=True)
class PlannedCall:
    """One call of a runner among several; arguments as in `Runner.prefill`.

    Attributes:
        past: the cache to continue, where it is there already.
        parent: index of the earlier call whose cache this one continues; None where that is `past`.
    """

    input_ids: Array
    attention_mask: Array
    position_ids: Array
    past: Cache | None = None
    parent: int | None = None

    @property
    def past_length(self) -> int:
        """Tokens before this call, padding included."""
        return int(self.attention_mask.shape[1] - self.input_ids.shape[1])
