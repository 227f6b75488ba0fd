"""FP8 of FBGEMM, as Meta publishes Llama: float8 with a scale per row.

Layout: `transformers/integrations/fbgemm_fp8.py`: `X.weight` float8_e4m3fn, `X.weight_scale` out×1 float32.
"""

from __future__ import annotations

from llmconv.quantized_weights.methods.fp8 import open_fp8
from llmconv.quantized_weights.quantized_checkpoint import QuantizationMethod

METHOD = QuantizationMethod("fbgemm_fp8", open_fp8, ("input_scale_ub",))
