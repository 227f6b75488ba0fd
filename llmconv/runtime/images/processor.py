"""Loads transformers' processor of a model; without torchvision that of its images alone."""

from __future__ import annotations

from functools import partialmethod
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

from llmconv.checkpoint import read_json
from llmconv.runtime.tokenizer_template import require_small_template

PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
"""Files that name the class of a processor."""


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

    require_small_template(folder)
    kind: Any = AutoProcessor
    known = _named_class(folder) or PROCESSOR_MAPPING.get(type(config), None)
    if not is_torchvision_available() and known and "video_processor" in known.get_attributes():
        kind = without_videos(known)
    return kind.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def _named_class(folder: Path) -> Any:
    """The class that the folder's files name; a model may have the processor of another family."""
    import transformers  # noqa: PLC0415

    for path in (folder / name for name in PROCESSOR_FILES):
        named = read_json(path).get("processor_class") if path.is_file() else None
        if isinstance(named, str) and named.endswith("Processor"):
            return getattr(transformers, named, None)
    return None


def without_videos(kind: Any) -> Any:
    """A class of processors without its processor of videos, which needs torchvision.

    Args:
        kind: a class of transformers.
    """

    def get_attributes(cls: Any) -> list[str]:
        return [name for name in kind.get_attributes.__func__(cls) if name != "video_processor"]

    members: dict[str, Any] = {"get_attributes": classmethod(get_attributes), "__module__": kind.__module__}
    if signature(kind.__init__).parameters["video_processor"].default is Parameter.empty:
        members["__init__"] = partialmethod(kind.__init__, video_processor=None)
    return type(kind.__name__, (kind,), members)
