"""The kinds of caches that layers keep between calls: each is a `CacheKind` in a file and one row of `CACHE_KINDS`."""

from __future__ import annotations

from importlib import import_module

from llmconv.export.caches.kind import CacheKind

CACHE_KINDS: dict[str, tuple[str, str] | None] = {
    "heads": None,
    "convolution": ("state_space", "CONVOLUTION_KIND"),
    "selective_scan": ("state_space", "SELECTIVE_SCAN_KIND"),
    "state_space": ("state_space", "STATE_SPACE_KIND"),
    "delta_rule": ("delta_rule", "KIND"),
    "channel_delta_rule": ("delta_rule", "CHANNEL_KIND"),
}
"""Kinds by `InputMap.cache`: module and name. Their functions need torch, and the table of families does not."""


def cache_kind(name: str) -> CacheKind:
    place = CACHE_KINDS[name]
    if place is None:
        return CacheKind(mixed=False)
    found: CacheKind = getattr(import_module(f"{__name__}.{place[0]}"), place[1])
    return found
