"""A folder for temporary files that a test has to leave empty."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def left_empty(folder: Path) -> Iterator[Path]:
    """Context in which temporary files go into a new folder; at its end llmconv has none left there.

    Args:
        folder: to be made.
    """
    folder.mkdir()
    gc.freeze()  # only what is made from here on may be garbage: collecting all objects of the process takes a second
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(folder))
        patch.setenv("TMPDIR", str(folder))
        yield folder
    gc.collect()  # a model refers to itself
    assert not [*folder.glob("llmconv-*")]
