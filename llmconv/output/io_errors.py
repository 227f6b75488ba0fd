"""Errors of the operating system while an output is written, as llmconv's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from llmconv.errors import LlmconvError, OutputFailed
from llmconv.files.safe_folder import FULL


@contextmanager
def failing_safely() -> Iterator[None]:
    """Turns an OSError into OutputFailed."""
    try:
        yield
    except LlmconvError:
        raise
    except OSError as error:
        full = "free some space and run again with `--resume`"
        other = "check the permissions of the file and its folder, and run again with `--resume`"
        raise OutputFailed(
            f"reading or writing failed: {error.strerror or error} ({error.filename or 'output'})",
            hint=full if error.errno in FULL else other,
        ) from error
