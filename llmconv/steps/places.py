"""Whether two inputs or outputs of steps are the same place."""

from __future__ import annotations

import os
from pathlib import Path

from llmconv.files.paths import LOCAL_SCHEMES, is_address


def place_of(name: str, home: Path) -> str:
    """One text for each place: the path without links, relative to `home`, on this machine; an address as it is."""
    scheme, separator, rest = name.partition("://")
    if is_address(name) and not (separator and scheme.lower() in LOCAL_SCHEMES):
        return name.rstrip("/")
    return os.path.realpath(home / (rest if separator else name))


def overlap(one: str, other: str, home: Path) -> bool:
    """Whether one of two paths (relative to `home`) or addresses is, or contains, the other."""
    places = [f"{place_of(name, home).rstrip('/')}/" for name in (one, other)]
    return places[0].startswith(places[1]) or places[1].startswith(places[0])
