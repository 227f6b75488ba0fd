"""MXFP8: float8 with an exponent of two per 32 columns, which transformers reads as fine-grained FP8.

Layout: that of `fp8.py`; scales uint8, biased by 127 (`transformers/quantizers/auto.py`, `finegrained_fp8.py`).
"""

from __future__ import annotations

from llmconv.quantized_weights.methods.fp8 import ACTIVATIONS, open_fp8
from llmconv.quantized_weights.quantized_checkpoint import QuantizationMethod

METHOD = QuantizationMethod("mxfp8", open_fp8, ACTIVATIONS)
