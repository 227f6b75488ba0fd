"""The initial adapter: an adapter before training, if its initialization subtracted it from the base.

PiSSA, OLoRA, CorDA and LoRA-GA train on W − s·B₀·A₀, so the trained weight is W + s·(B·A − B₀·A₀) (PEFT
`tuners/lora/model.py`, `subtract_mutated_init`).
"""

from __future__ import annotations

from dataclasses import replace

from llmconv.convert.adapters.adapter import Adapter
from llmconv.errors import MalformedInput, UnsupportedInput


def with_initial(trained: Adapter, initial: Adapter) -> Adapter:
    """`trained` with the adapter it started from.

    Raises:
        MalformedInput: they are not of one training run.
        UnsupportedInput: parameters of fused experts, which these initializations do not support.
    """
    if trained.config.parameters or initial.config.parameters:
        raise UnsupportedInput(
            f"`{trained.name}` sets `target_parameters`, which no initial adapter goes with",
            hint="no initialization changes such weights; leave out `--initial-adapter`",
        )
    for module in sorted(trained.pairs.keys() | initial.pairs.keys()):
        after, before = trained.pairs.get(module), initial.pairs.get(module)
        if after is None or before is None:
            raise _unlike(trained, f"only {'the trained' if after else 'the initial'} one adapts `{module}`")
        if (after.a.shape, after.b.shape) != (before.a.shape, before.b.shape):
            raise _unlike(trained, f"`{module}` has rank {before.rank} in the initial one, {after.rank} in the trained")
    return replace(trained, initial=initial)


def _unlike(trained: Adapter, why: str) -> MalformedInput:
    return MalformedInput(
        f"the initial adapter is not the one that `{trained.name}` was trained from: {why}",
        hint="give the adapter saved before the first step; an adapter that PEFT has converted needs none",
    )
