"""The kinds of caches that layers keep between calls. A kind is one file here and one row of `CACHE_KINDS`."""

from __future__ import annotations

from llmconv.export.caches import convolution, delta_rule, selective_scan, state_space
from llmconv.export.caches.kind import CacheKind

CACHE_KINDS: dict[str, CacheKind] = {
    "heads": CacheKind(mixed=False),
    "convolution": convolution.KIND,
    "selective_scan": selective_scan.KIND,
    "state_space": state_space.KIND,
    "delta_rule": delta_rule.KIND,
    "channel_delta_rule": delta_rule.CHANNEL_KIND,
}
"""Kinds by `InputMap.cache`."""
