"""merged_weights: the weights of a model with an adapter merged in memory, for the eager model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from llmconv.checkpoint import open_checkpoint
from llmconv.convert.adapters.base_checks import warn_of_origin
from llmconv.convert.adapters.merging import merged
from llmconv.convert.models.completeness import check_complete
from llmconv.convert.opening import open_adapters
from llmconv.errors import LlmconvError, UnsupportedInput
from llmconv.progress import warn_all
from llmconv.tensors import LazyTensor

MERGE = "merge it into a new folder: `llmconv merge-lora BASE ADAPTER -o OUT`"


def merged_weights(folder: Path, adapter: str | Path) -> Mapping[str, LazyTensor]:
    """The weights that `merge-lora` would write from a base folder and an adapter, each computed when it is read.

    Raises InputRefused, MalformedInput and UnsupportedInput as `merge-lora`, and UnsupportedInput if the adapter
    changes the model's configuration.
    """
    base = open_checkpoint(folder)
    with _hints_to_merge():
        opened = open_adapters([adapter], (), base, None)
    result, edits = merged(base, opened)
    if result.config != base.config:
        raise UnsupportedInput("the adapter changes `config.json` of the model", hint=MERGE)
    incomplete = check_complete(result.tensors, result.config, folder.name)
    warn_all((*warn_of_origin(base, opened, str(folder)), *edits.warnings, *incomplete))
    return result.tensors


@contextmanager
def _hints_to_merge() -> Iterator[None]:
    """Context in which hints that name an option of `merge-lora` also name the command."""
    try:
        yield
    except LlmconvError as error:
        if error.hint and "--alpha" in error.hint:
            error.hint = f"{MERGE}, with `--alpha`"
        raise
