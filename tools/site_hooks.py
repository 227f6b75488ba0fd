"""Hooks of MkDocs: pages that lie outside docs/ become part of the site, and links to them, and to code, are mended."""

from __future__ import annotations

import importlib
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
OUTSIDE = {
    "README.md": "readme.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "plugins/optimum/README.md": "plugins/optimum.md",
    **{
        f"examples/{name}/README.md": f"examples/{name}.md"
        for name in ("custom-family", "accessory-images", "tiny-llama")
    },
}
"""Pages by their path in the repository, and where they are in the site."""

NAMES = re.compile(r"^<!-- names of ([\w.]+):\s(.*?) -->$", re.MULTILINE | re.DOTALL)
"""On the page about Python: a module and its names; after a class, in parentheses, the members to show."""
NAME = re.compile(r"(\w+)(?:\(([^)]*)\))?")
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^)\s]+)\)")
CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that lie outside docs/."""
    for path, place in OUTSIDE.items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / path)))
    return files


def named(found: re.Match[str]) -> list[tuple[Any, list[str]]]:
    """The functions and classes that a comment of the page about Python names, and the members of each.

    Args:
        found: the comment, a match of `NAMES`.

    Raises:
        AttributeError: there is no such name or member.
    """
    module = importlib.import_module(found[1])
    values = [(getattr(module, name), re.findall(r"\w+", members)) for name, members in NAME.findall(found[2])]
    for value, members in values:
        for member in members:
            getattr(value, member)
    return values


def reference(found: re.Match[str]) -> str:
    """The signatures and docstrings of the names in a comment of the page about Python.

    Args:
        found: the comment, a match of `NAMES`.
    """
    return "\n\n".join(
        f"::: {value.__module__}.{value.__qualname__}\n    options:\n      heading_level: 3\n      members: {members}"
        for value, members in named(found)
    )


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Mends the links of a page, outside of its code; the names on the page about Python become their docstrings."""
    place = page.file.src_uri
    if place == "api.md":
        markdown = NAMES.sub(reference, markdown)
    source = next((path for path, site in OUTSIDE.items() if site == place), f"docs/{place}")
    codes: list[str] = []

    def hide(found: re.Match[str]) -> str:
        codes.append(found[0])
        return f"\0{len(codes) - 1}\0"

    hidden = LINK.sub(lambda found: mended(found, source, place), CODE.sub(hide, markdown))
    return re.sub(r"\0(\d+)\0", lambda found: codes[int(found[1])], hidden)


def mended(found: re.Match[str], source: str, place: str) -> str:
    """A link as the site needs it; one to a file that is not a page becomes plain text.

    Args:
        found: the link.
        source: path of the page in the repository.
        place: path of the page in the site.
    """
    text, target = found[1], found[2]
    path, mark, anchor = target.partition("#")
    if "://" in target or not path:
        return found[0]
    there = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    site = OUTSIDE.get(there, there.removeprefix("docs/") if there.startswith("docs/") else "")
    if not site:
        return text
    return f"[{text}]({posixpath.relpath(site, posixpath.dirname(place) or '.')}{mark}{anchor})"
