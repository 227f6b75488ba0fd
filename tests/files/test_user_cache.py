"""The user's cache: what a killed process left in it goes, what a living one makes stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from llmconv.errors import InputRefused
from llmconv.files.safe_folder import unfinished_folder

MAKE = """
import sys
from pathlib import Path
from llmconv.files.safe_folder import unfinished_folder
with unfinished_folder(Path(sys.argv[1])) as made:
    (made / "weights").write_bytes(b"x")
    print(made, flush=True)
    sys.stdin.read()
"""


def test_the_folder_of_a_killed_process_is_removed_and_that_of_a_living_one_stays(tmp_path: Path) -> None:
    line = [sys.executable, "-c", MAKE, str(tmp_path)]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as maker:
        assert maker.stdout
        theirs = Path(maker.stdout.readline().strip())
        with unfinished_folder(tmp_path) as mine:
            assert theirs.is_dir() and mine.is_dir() and mine != theirs
        assert theirs.is_dir() and not mine.exists()
        maker.send_signal(signal.SIGKILL)
        maker.wait()
        assert (theirs / "weights").is_file()
    with unfinished_folder(tmp_path) as mine:
        assert [*tmp_path.iterdir()] == [mine]
    assert [*tmp_path.iterdir()] == []


def test_an_error_of_the_body_is_not_swallowed_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(BlockingIOError), unfinished_folder(tmp_path):
        raise BlockingIOError
    assert [*tmp_path.iterdir()] == []


def test_a_renamed_folder_stays(tmp_path: Path) -> None:
    with unfinished_folder(tmp_path) as made:
        made.rename(tmp_path / "whole")
    assert [*tmp_path.iterdir()] == [tmp_path / "whole"]


def test_a_link_of_that_name_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "home/unfinished-x").symlink_to(tmp_path / "other")
    with unfinished_folder(tmp_path / "home"):
        pass
    assert (tmp_path / "other").is_dir()


NOBODY = """
import os
from llmconv.files.safe_folder import user_cache
os.setuid(54321)
user_cache("exported")
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become a user that the system does not know")
def test_a_user_without_a_home_folder_is_told_what_to_set() -> None:
    variables = {name: value for name, value in os.environ.items() if name not in ("HOME", "XDG_CACHE_HOME")}
    done = subprocess.run([sys.executable, "-c", NOBODY], env=variables, capture_output=True, text=True, check=False)
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"{InputRefused.__module__}.{InputRefused.__name__}: there is no place for a cache: HOME is")
