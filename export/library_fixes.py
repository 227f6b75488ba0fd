"""transformers' own repairs for tracing to ONNX (`transformers.exporters`), where the installed version has them.

They rewrite what the exporter of torch has no or a wrong translation for: floor division of sizes, chunks of a dynamic
axis, `repeat_interleave`, masks filled in place, and the like.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

try:
    _onnx: Any = importlib.import_module("transformers.exporters.exporter_onnx")
    _utils: Any = importlib.import_module("transformers.exporters.utils")
except ImportError:  # an older transformers
    _onnx = _utils = None

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
