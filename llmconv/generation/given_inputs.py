"""The values that a request gives for a model's extra inputs, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from llmconv.errors import InputRefused, UsageProblem
from llmconv.files.paths import kind_of
from llmconv.runtime.extra_inputs import BATCH, PAST, ExtraInput, GivenInputs, ModelCall
from llmconv.tensors import BY_NAME, Array

RequestInputs = Mapping[str, Any]
"""Numbers or nested lists by name of an extra input, without the axis of the batch; tokens are those of the prompt."""

KINDS = {"int64": "iu", "int32": "iu", "bool": "b", "float32": "fiu"}
"""numpy's kinds of the numbers that an input of a dtype may be given as."""


def given_inputs(given: RequestInputs, tokens: int, known: Mapping[str, ExtraInput], name: str) -> GivenInputs:
    """The values of a prompt of `tokens` tokens, checked against the resolved extra inputs `known` of the model.

    Raises InputRefused for an unknown input, or a value of another shape or kind.
    """
    if not isinstance(given, Mapping):
        raise InputRefused(f"the inputs of {name} are {kind_of(given)}", hint='give {"name": values}')
    return GivenInputs(tokens, {one: _array(one, value, tokens, known, name) for one, value in given.items()})


def _array(input_name: str, value: Any, tokens: int, known: Mapping[str, ExtraInput], prompt: str) -> Array:
    extra = known.get(input_name)
    if extra is None or PAST in extra.axes:
        names = ", ".join(f"`{one}`" for one, row in known.items() if PAST not in row.axes) or "none"
        raise InputRefused(f"{prompt} gives `{input_name}`, which the model does not take", hint=f"it takes {names}")
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise InputRefused(
            f"{prompt} gives `{input_name}` as lists of different lengths", hint="give one number for each element"
        ) from error
    if array.dtype.kind in KINDS[extra.dtype]:
        array = array.astype(BY_NAME[extra.dtype].numpy)
    without_batch = replace(extra, axes=tuple(axis for axis in extra.axes if axis != BATCH))
    if problem := without_batch.misfit(array, _prompt_call(tokens)):
        raise InputRefused(
            f"{prompt} gives `{input_name}` as {problem}",
            hint=f"the prompt has {tokens} tokens" if extra.by_token else "see docs/adding-a-family.md",
        )
    return array


def _prompt_call(tokens: int) -> ModelCall:
    """A call of one prompt; only its sizes are used."""
    ids = np.ones((1, tokens), dtype=np.int64)
    return ModelCall(ids, ids, ids)


def inputs_of_prompts(
    prompts: Sequence[Sequence[int]], inputs: Sequence[RequestInputs] | None, known: Mapping[str, ExtraInput]
) -> list[GivenInputs | None]:
    """The values by name of each prompt (token ids), checked by `given_inputs`; None for a prompt without any.

    Raises UsageProblem unless there is one mapping per prompt.
    """
    if inputs is None:
        return [None] * len(prompts)
    if not (isinstance(inputs, Sequence) and len(inputs) == len(prompts)):
        count = len(inputs) if isinstance(inputs, Sequence) else kind_of(inputs)
        raise UsageProblem(f"{len(prompts)} prompts, and inputs for {count}", hint="give one dict for each prompt")
    several = zip(prompts, inputs, prompt_names(len(prompts)), strict=True)
    found = [given_inputs(one, len(prompt), known, name) for prompt, one, name in several]
    return [one if one.values else None for one in found]


def require_together(rows: Sequence[GivenInputs], known: Mapping[str, ExtraInput]) -> None:
    """Raises UsageProblem for values that the prompts of one batch cannot have together.

    That is, if an input has no axis of the batch and its values differ, or only some prompts replace a computed value.
    """
    for name in {name for row in rows for name in row.values}:
        arrays = [row.values.get(name) for row in rows]
        missing = any(array is None for array in arrays)
        shared = BATCH not in known[name].axes
        if missing and (shared or callable(known[name].default)):
            raise UsageProblem(f"not all prompts of a batch give `{name}`", hint="give it for all, or `--batch-size 1`")
        if shared and not all(np.array_equal(arrays[0], array) for array in arrays):  # type: ignore[arg-type]
            raise UsageProblem(
                f"`{name}` has one value for a batch, and its prompts differ", hint="give `--batch-size 1`"
            )


def prompt_names(count: int) -> list[str]:
    """The names of prompts in messages."""
    return ["the prompt"] if count == 1 else [f"prompt {at}" for at in range(1, count + 1)]
