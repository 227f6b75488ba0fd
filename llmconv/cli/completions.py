"""What the shell completes as values of options whose names are found at run time, or that also take a path."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import click
from click.shell_completion import CompletionItem

Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]
"""As click's `shell_complete`: from the beginning of a value to the values."""

LAYOUTS = ("onnxruntime", "genai", "optimum", "transformersjs")
CLIENTS = LAYOUTS[1:]
"""The modules with these take seconds to import, which is too long for a key; a test compares them."""


def completed(names: Callable[[], Iterable[str]], *, paths: bool = False) -> Complete:
    """A completion from all `names`; with `paths`, a value that begins none of them is completed as a path."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        found = [CompletionItem(name) for name in names() if name.startswith(incomplete)]
        return found or ([CompletionItem(incomplete, type="file")] if paths else [])

    return complete


def _writable_formats() -> list[str]:
    from llmconv.convert.formats import formats

    return [name for name, one in formats().items() if one.save is not None]


def _writable_deltas() -> list[str]:
    from llmconv.convert.deltas.scripts import SCRIPTS
    from llmconv.convert.formats import delta_formats

    return [*(name for name, one in delta_formats().items() if one.save is not None), *SCRIPTS]


def _templates() -> list[str]:
    from llmconv.generation.chat_templates import TEMPLATES

    return [*TEMPLATES]


layouts = completed(lambda: LAYOUTS)
clients = completed(lambda: CLIENTS)
formats = completed(_writable_formats)
deltas = completed(_writable_deltas)
templates = completed(_templates, paths=True)
