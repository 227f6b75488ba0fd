"""Loads transformers' processor of a model; without torchvision that of its images alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def load_processor(folder: Path, config: Any) -> Any:
    """The processor of a model.

    Args:
        folder: has its files and those of the tokenizer.
        config: the whole model's transformers config.

    Raises:
        Exception: of any class; transformers cannot read the files, or needs a library that is not installed.
    """
    from transformers import PROCESSOR_MAPPING, AutoProcessor  # noqa: PLC0415 - imports torch
    from transformers.utils import is_torchvision_available  # noqa: PLC0415

    kind: Any = AutoProcessor
    known = PROCESSOR_MAPPING.get(type(config), None)
    if not is_torchvision_available() and known and "video_processor" in known.get_attributes():
        kind = without_videos(known)
    return kind.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def without_videos(kind: Any) -> Any:
    """A class of processors without its processor of videos, which needs torchvision.

    Args:
        kind: a class of transformers.
    """

    def get_attributes(cls: Any) -> list[str]:
        return [name for name in kind.get_attributes.__func__(cls) if name != "video_processor"]

    return type(kind.__name__, (kind,), {"get_attributes": classmethod(get_attributes), "__module__": kind.__module__})
