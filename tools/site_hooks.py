"""Hooks of MkDocs: pages that lie outside docs/ become part of the site, and links to them, and to code, are mended."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

import llmconv

ROOT = Path(__file__).parents[1]
OUTSIDE = {
    "README.md": "readme.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    **{
        f"examples/{name}/README.md": f"examples/{name}.md"
        for name in ("custom-family", "accessory-images", "tiny-llama")
    },
}
"""Pages by their path in the repository, and where they are in the site."""

ROOMS = ("convert", "export", "verify", "generation", "embedding", "bench", "push")
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^)\s]+)\)")
CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that lie outside docs/."""
    for path, place in OUTSIDE.items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / path)))
    return files


def reference() -> str:
    """A section for each room, in it the docstring of each public name; constants have none."""
    parts: list[str] = []
    for room in ROOMS:
        module = getattr(llmconv, room)
        parts.append(f"## llmconv.{room}")
        for name in module.__all__:
            value = getattr(module, name)
            if hasattr(value, "__qualname__"):
                parts.append(f"::: {value.__module__}.{value.__qualname__}\n    options:\n      heading_level: 3")
    parts.append("## llmconv.errors\n\n::: llmconv.errors\n    options:\n      heading_level: 3")
    return "\n\n".join(parts)


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Mends the links of a page, outside of its code; the page about Python gets the reference of the public names."""
    place = page.file.src_uri
    if place == "api.md":
        return f"{markdown}\n{reference()}"
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
