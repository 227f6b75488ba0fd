"""Names of a decoder's inputs and outputs by exporter: one file per exporter in this folder, found by listing it.

Other packages add a map with `register_port_map`, or with an entry point in the group `llmconv.port_maps` whose object
is a `PortMap`; `--input-map` also accepts a JSON file with the same fields.
"""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from llmconv.argument_checks import checked
from llmconv.checkpoint import read_json
from llmconv.errors import MalformedInput, UsageProblem
from llmconv.plugins import plugins
from llmconv.verify.other_exporters.port_map import PortMap

AUTO = "auto"
ENTRY_POINTS = "llmconv.port_maps"

_registered: dict[str, PortMap] = {}


@checked
def register_port_map(port_map: PortMap) -> None:
    """Adds a map, or replaces the map with the same name."""
    _registered[port_map.name] = port_map


@cache
def _built_in() -> dict[str, PortMap]:
    """The maps of this folder and of installed packages, by name."""
    maps = list(plugins(__name__, "MAP", PortMap).values())
    maps += [entry.load() for entry in entry_points(group=ENTRY_POINTS)]
    return {port_map.name: port_map for port_map in maps}


def port_maps() -> dict[str, PortMap]:
    """All maps by name."""
    return {**_built_in(), **_registered}


def find_port_maps(name: str) -> list[PortMap]:
    """The maps to try: all maps for `auto`, else the map with that name or from that JSON file.

    Raises:
        UsageProblem: there is no such map and no such file.
        MalformedInput: the file is not an input map.
    """
    table = port_maps()
    if name == AUTO:
        return list(table.values())
    if name in table:
        return [table[name]]
    if not Path(name).is_file():
        raise UsageProblem(
            f"unknown input map `{name}`", hint=f"give {AUTO}, {', '.join(sorted(table))}, or a JSON file"
        )
    return [_from_json(Path(name))]


def _from_json(path: Path) -> PortMap:
    """The map in a JSON file, in which a list of names may be a single name."""
    given = {"name": path.stem, "title": path.name, **read_json(path, by_hand=True)}
    several = {field.name for field in fields(PortMap) if not isinstance(field.default, str)} - {"name", "title"}
    row: dict[str, Any] = {
        key: (value,) if key in several and isinstance(value, str) else value for key, value in given.items()
    }
    row = {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
    try:
        return PortMap(**row)
    except (TypeError, ValueError) as error:
        raise MalformedInput(
            f"`{path.name}` is not an input map: {error}", hint="docs/verification-other-exporters.md shows the fields"
        ) from error
