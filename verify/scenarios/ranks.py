"""The order of scenarios under a budget, by what they found. Written by `python -m tools.scenario_ranks`."""

from __future__ import annotations

CORE = (
    "garbage under the mask",
    "chunked prefill, pieces of 1 to 48 tokens",
    "pasts of 30 to 1,022 tokens",
    "prefill, 33 tokens",
    "left padding",
    "decode chain, 16 steps",
)
"""The mandatory scenarios: they catch all of the 144 mutants that a scenario on the model's own weights catches.

Tiny models: llama, gemma2, gpt2, bloom.
"""

CORE_STREAMED = (
    "right padding",
    "chunked prefill, pieces of 1 to 48 tokens",
    "left padding",
    "prefill, 33 tokens",
    "decode chain, 16 steps",
)
"""The same without the scenarios that edit a cache or make one up, which do not run layer by layer."""

RANKS = (
    ("garbage under the mask", 136, 136),
    ("chunked prefill, pieces of 1 to 48 tokens", 7, 131),
    ("pasts of 30 to 1,022 tokens", 1, 129),
    ("prefill, 33 tokens", 0, 123),
    ("left padding", 0, 133),
    ("decode chain, 16 steps", 0, 125),
    ("right padding", 134, 134),
    ("positions over the whole context", 5, 108),
    ("window crossed behind a made-up past", 1, 43),
    ("first and last token", 1, 120),
    ("rows exchanged", 134, 134),
    ("end of the context", 3, 104),
    ("sliding window crossed", 1, 43),
    ("a row of padding only", 133, 133),
    ("middle of the context", 3, 104),
    ("prefill, 1 token", 1, 76),
    ("holes in the mask", 133, 133),
    ("positions with gaps", 3, 106),
    ("prefill, 2 tokens", 1, 118),
    ("batch of 6", 133, 133),
    ("one-token prompt", 1, 114),
    ("equal rows of repeated tokens", 125, 125),
    ("second turn", 124, 124),
    ("tokens taken back", 124, 124),
    ("batch of 3", 124, 124),
    ("prefill, 7 tokens", 117, 117),
    ("prefill, 3 tokens", 116, 116),
    ("beyond the original context", 0, 0),
    ("first and last values of extra inputs", 0, 0),
)
"""Name of a scenario, mutants that it catches and none above it does, and mutants that it catches in all.

The mandatory scenarios come first. After them, the first number is counted as if nothing had been caught yet, and again
whenever all are caught.
"""
