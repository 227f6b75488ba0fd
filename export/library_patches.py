"""transformers' own repairs for tracing to ONNX (`transformers.exporters`), where the installed version has them.

They rewrite what the exporter of torch has no or a wrong translation for: floor division of sizes, chunks of a dynamic
axis, `repeat_interleave`, masks filled in place, and the like.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

_matcher: Any = importlib.import_module("onnxscript.rewriter._matcher")

try:
    _onnx: Any = importlib.import_module("transformers.exporters.exporter_onnx")
    _utils: Any = importlib.import_module("transformers.exporters.utils")
except ImportError:  # an older transformers
    _onnx = _utils = None

_cache: Any = importlib.import_module("transformers.cache_utils")

EMPTY_LAYER: Callable[[], Any] = getattr(_cache, "DummyLayer", _cache.LinearAttentionLayer)
"""The cache of a layer that keeps nothing; transformers before 5.23 takes a linear attention layer without states."""

TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = getattr(_onnx, "_ONNX_TRANSLATION_TABLE", {})
"""Operation of torch -> function of onnxscript."""


def library_fixes() -> AbstractContextManager[None]:
    """The patches of torch, reverted on leaving."""
    patches: AbstractContextManager[None] = _utils.apply_patches("onnx") if _utils else nullcontext()
    return patches


def fix_program(graph_module: Any) -> None:
    """Rewrites nodes of a traced program in place."""
    if _utils:
        _utils.apply_fx_node_fixes("onnx", graph_module)


@contextmanager
def exact_constants() -> Iterator[None]:
    """The optimizer takes a constant for another only where it is that number.

    Else `x + 1e-8` is `x` for it, and an epsilon is lost: its patterns match within 1e-8, or a relative 1e-5.
    """
    kept = _matcher.math
    _matcher.math = SimpleNamespace(isclose=lambda a, b, **tolerances: a == b)
    try:
        yield
    finally:
        _matcher.math = kept
