"""A report that cannot be written is found before the work that it would report."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from llmconv.errors import InputRefused, OutputFailed
from llmconv.files.safe_folder import require_writable

NAMES = ("report.json", "junit.xml")


def test_an_unwritable_report_folder_is_found_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputRefused, match="`.*/file` is not a folder, so `.*/file/report` cannot be written"):
        require_writable(tmp_path / "file" / "report", NAMES)
    require_writable(tmp_path / "new" / "report", NAMES)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_full_disk_is_found_before_the_run(small_disk: Path) -> None:
    (small_disk / "other").write_bytes(bytes(900_000))
    with pytest.raises(OutputFailed, match="cannot write the report to `.*report`: No space left"):
        require_writable(small_disk / "report", NAMES)
    assert os.listdir(small_disk) == ["other"]


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir])
def test_files_that_cannot_be_replaced_are_found_before_the_run(make: Any, tmp_path: Path) -> None:
    make(tmp_path / "junit.xml")
    with pytest.raises(InputRefused, match=r"`.*junit\.xml` is a (pipe|folder)"):
        require_writable(tmp_path, NAMES)


def test_a_file_in_place_of_the_folder_is_found_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "report").write_text("mine")
    with pytest.raises(InputRefused, match="`.*/report` is not a folder"):
        require_writable(tmp_path / "report", NAMES)
