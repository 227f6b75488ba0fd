"""The model class of a merge whose adapter was trained with another head than the base has: classes, spans."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from llmconv.convert.adapters.adapter import Adapter
from llmconv.convert.adapters.placement.edits import Edits
from llmconv.convert.models.architectures import auto_classes
from llmconv.convert.models.config_file import architecture
from llmconv.errors import MalformedInput, UnsupportedInput, listing

TASKS = {
    "SEQ_CLS": ("SEQUENCE_CLASSIFICATION", "ForSequenceClassification"),
    "TOKEN_CLS": ("TOKEN_CLASSIFICATION", "ForTokenClassification"),
    "QUESTION_ANS": ("QUESTION_ANSWERING", "ForQuestionAnswering"),
}
"""PEFT's `task_type` to the table of transformers' classes, and the ending of their names."""

HEADS = ("score", "classifier", "qa_outputs", "classification_head")
"""How transformers' classes call the module that replaces the output head."""


def follow_task(edits: Edits, adapters: Sequence[Adapter], head: str, config: dict[str, Any]) -> None:
    """Makes `config` that of the class which the adapters were trained as, and leaves out the head that it lacks.

    Args:
        edits: changes by the adapters.
        adapters: all of them; a task of `TASKS` counts, every other keeps the class of the base.
        head: name of the output head of a language model.
        config: content of `config.json`; changed in place.

    Raises:
        MalformedInput: adapters of different tasks, or the trained head is not in the file.
        UnsupportedInput: the installed transformers has no such class for the base.
    """
    tasks = {task: adapter for adapter in adapters if (task := _task(adapter))}
    if len(tasks) > 1:
        raise MalformedInput(
            f"the adapters were trained for different tasks: {listing(sorted(tasks))}", hint="merge one at a time"
        )
    for task, adapter in tasks.items():
        table, ending = TASKS[task]
        found = _head(edits.tensors)
        if not found:
            raise MalformedInput(
                f"`{adapter.name}` was trained for {task}, and neither its file nor the base contains the head",
                hint="save the adapter with the head in `modules_to_save`; to merge it into the language model alone, "
                "set `task_type` to CAUSAL_LM in its `adapter_config.json`",
            )
        if not architecture(config).endswith(ending):
            config["architectures"] = [_class(str(config.get("model_type")), table)]
            if head in edits.tensors and not edits.touches(head):
                del edits.tensors[head]
                edits.warnings.append(
                    f"`{head}` is left out: OUT is a {architecture(config)}, with the head of `{adapter.name}`"
                )
        _set_labels(config, edits.current(found).num_rows)


def _task(adapter: Adapter) -> str:
    """The key in `TASKS`, by the config's task or else by the class that PEFT wrapped; empty for any other."""
    if adapter.config.task in TASKS:
        return adapter.config.task
    wrapped = adapter.config.base_class if not adapter.config.task else ""
    return next((task for task, (_, ending) in TASKS.items() if wrapped.endswith(ending)), "")


def _class(model_type: str, table: str) -> str:
    if model_type not in (classes := auto_classes(table)):
        raise UnsupportedInput(
            f"transformers has no class for {table.lower().replace('_', ' ')} of type `{model_type[:80]}`",
            hint="merge it with PEFT's `merge_and_unload`, in the code that trained it",
        )
    return classes[model_type]


def _head(names: Iterable[str]) -> str:
    """The last matrix of the head for a task, whose rows are the classes; empty if there is none."""
    found = [name for name in names if name.partition(".")[0] in HEADS and name.endswith(".weight")]
    return found[-1] if found else ""


def _set_labels(config: dict[str, Any], count: int) -> None:
    """Names for `count` classes, unless the config has as many."""
    named = config.get("id2label")
    config.pop("num_labels", None)
    if not isinstance(named, dict) or len(named) != count:
        names = {str(label): f"LABEL_{label}" for label in range(count)}
        config |= {"id2label": names, "label2id": {name: int(label) for label, name in names.items()}}
