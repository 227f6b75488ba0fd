"""LN tuning: norms that were trained themselves and replace the base's (arXiv 2312.11420; PEFT `tuners/ln_tuning`).

The file holds `<module>.ln_tuning_layers.weight` and `.bias`; there is no formula.
"""

from __future__ import annotations

from llmconv.convert.adapters.tuners import Fit, Shape, Tuner
from llmconv.convert.adapters.tuners.learned import Delta, Learned


def fit(learned: Learned) -> Fit:
    """Never asked: no tensor is a part."""
    raise NotImplementedError


def delta(learned: Learned, shape: Shape) -> Delta:
    """Never asked: no tensor is a part."""
    raise NotImplementedError


TUNER = Tuner(peft_type="LN_TUNING", parts=(), fields=(), fit=fit, delta=delta)
