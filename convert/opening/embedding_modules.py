"""The modules of an embedding model or a reranker, as `modules.json` of sentence-transformers lists them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from llmconv.checkpoint import own_file, read_small
from llmconv.errors import MalformedInput

MODULES = "modules.json"


def modules_in(folder: Path) -> tuple[str, ...]:
    """The last part of the types of the modules, in order, such as `Pooling`; empty without the file.

    Raises:
        MalformedInput: it is not such a list, or a link out of the folder.
    """
    if not (folder / MODULES).is_file():
        return ()
    try:
        content: Any = json.loads(read_small(own_file(folder, MODULES)))
    except (ValueError, RecursionError) as error:
        raise MalformedInput(f"`{MODULES}` is not JSON", hint="copy the file again") from error
    if not isinstance(content, list) or not all(isinstance(one, dict) for one in content):
        raise MalformedInput(f"`{MODULES}` is not a list of modules", hint="copy the file again")
    return tuple(str(one.get("type", "")).rpartition(".")[2][:40] for one in content)
