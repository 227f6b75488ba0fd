"""LN tuning: trained norms that replace the base's (arXiv 2312.11420; PEFT `tuners/ln_tuning`).

The file contains `<module>.ln_tuning_layers.weight` and `.bias`, which are whole tensors; there is no formula.
"""

from __future__ import annotations

from llmconv.convert.adapters.tuners import Tuner

TUNER = Tuner(peft_type="LN_TUNING", parts=(), fields=())
