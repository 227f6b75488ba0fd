"""A bucket on the loopback, and its credentials in the environment."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.builders.temporary import left_empty
from tests.stores.reading_bucket import Bucket, serving


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bucket]:
    with serving(tmp_path_factory.mktemp("served")) as bucket:
        yield bucket


@pytest.fixture
def bucket(served: Bucket, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """A bucket that all tests share: each puts objects under names of its own."""
    connect(served, monkeypatch)
    served.requests()
    return served


@pytest.fixture
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """A bucket of a store that is busy one time in five, and breaks off three bodies of ten."""
    with serving(tmp_path / "faulty", busy=0.2, cut=0.3) as bucket:
        connect(bucket, monkeypatch)
        yield bucket


def connect(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in bucket.environment.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path) -> Iterator[Path]:
    """The folder for temporary files, which every test leaves empty."""
    with left_empty(tmp_path / "temporary") as folder:
        yield folder
