"""The tasks of `pipeline` by name, and models by name: what `pipeline` runs, listed, checked and extended."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

from llmconv.argument_checks import checked
from llmconv.errors import UsageProblem, listing

TEXT_GENERATION = "text-generation"

Opener = Callable[..., Any]
"""Called with the model and the keywords of `pipeline`; returns what is called with the inputs."""

_TASKS: dict[str, Opener] = {}
_MODELS: dict[str, Any] = {}


@checked
def register_task(name: str, opener: Any) -> None:
    """Adds a task to those of `pipeline`, or replaces it.

    Args:
        name: of the task; `_` is `-`.
        opener: called with the model and the keywords of `pipeline`; returns what is called with the inputs.

    Raises:
        UsageProblem: the name is empty, or `opener` cannot be called.
    """
    if not name.strip() or not callable(opener):
        raise UsageProblem("a task has a name and a function that opens it", hint="`register_task(NAME, FUNCTION)`")
    _TASKS[_spelled(name)] = opener


def supported_tasks() -> tuple[str, ...]:
    """The names of all tasks, sorted."""
    return tuple(sorted(_TASKS))


@checked
def check_task(name: str) -> str:
    """The name of a task as `supported_tasks` has it.

    Args:
        name: with `-` or `_`.

    Raises:
        UsageProblem: there is no such task; the hint has the closest one, or all.
    """
    spelled = _spelled(name)
    if spelled not in _TASKS:
        near = get_close_matches(spelled, _TASKS, n=1)
        known = f"is `{near[0]}` meant?" if near else f"tasks are {listing(supported_tasks())}"
        raise UsageProblem(f"unsupported pipeline task `{name}`", hint=known)
    return spelled


def get_task(name: str) -> Opener:
    """The function that opens a model for a task.

    Args:
        name: with `-` or `_`.

    Raises:
        UsageProblem: there is no such task.
    """
    return _TASKS[check_task(name)]


@checked
def register_model(name: str, model: Any) -> None:
    """Gives a model a name for `pipeline`, before folders and the Hub are searched.

    Args:
        name: such as `my-llama`.
        model: what `pipeline` takes: a folder, a pair of graphs (prefill, decode), `ModelFiles`; None to forget it.

    Raises:
        UsageProblem: the name is empty.
    """
    if not name.strip():
        raise UsageProblem("a model has a name", hint="`register_model(NAME, MODEL)`")
    if model is None:
        _MODELS.pop(name, None)
    else:
        _MODELS[name] = model


def registered(model: Any) -> Any:
    """The model of a registered name; any other value as it is."""
    return _MODELS.get(model, model) if isinstance(model, str) else model


def _spelled(name: str) -> str:
    return name.strip().replace("_", "-")
