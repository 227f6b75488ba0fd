"""EncodedPrompt: a prompt's tokens, embeddings in place of some of them, and values of the model's extra inputs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from llmconv.errors import InputRefused, MalformedInput, UsageProblem, first_line
from llmconv.files.paths import kind_of
from llmconv.files.safetensors_file import read_header
from llmconv.generation.prompts import Prompt
from llmconv.runtime.extra_inputs import BATCH, PAST, ExtraInput, GivenInputs, ModelCall
from llmconv.runtime.runner import PromptEmbeddings
from llmconv.tensors import BY_NAME, Array


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as a model takes it: tokens, and a function that makes embeddings for some of them, or None."""

    ids: list[int]
    embeddings: Callable[[], PromptEmbeddings] | None = None


def with_embeddings(prompt: Prompt, ids: list[int], tokenizer: Any, name: str = "the prompt") -> EncodedPrompt:
    """A prompt with its own embeddings, placed among the tokens `ids`; raises as `read_embeddings` and `placed`."""
    token = token_of(tokenizer, prompt.placeholder) if prompt.placeholder else None

    def found() -> tuple[list[int], PromptEmbeddings]:
        given = prompt.embeddings
        rows = read_embeddings(Path(given)) if isinstance(given, str | Path) else as_embeddings(given)
        return placed(ids, rows, token, name)

    return EncodedPrompt(found()[0], lambda: found()[1])


FORM = "give an array of floats [tokens, hidden]"
LARGEST = 1 << 30  # maximum number of bytes of the embeddings of one prompt, in float32


def as_embeddings(value: Any, name: str = "`embeddings`") -> Array:
    """Floats of an array or a torch tensor as float32 [tokens, hidden]; UsageProblem for others, or not finite ones."""
    if hasattr(value, "detach"):  # a tensor; numpy has no bfloat16
        value = value.detach().float().cpu()
    if not hasattr(value, "__array__"):
        raise UsageProblem(f"{name} is {kind_of(value)}, not an array", hint=FORM)
    array = np.asarray(value)
    is_float = array.dtype.kind == "f" or array.dtype == ml_dtypes.bfloat16
    if problem := _form_problem(array.shape, str(array.dtype), is_float):
        raise UsageProblem(f"{name} {problem}", hint=FORM)
    with np.errstate(over="ignore"):
        rows = np.ascontiguousarray(array, dtype=np.float32)
    if not np.isfinite(rows).all():
        raise UsageProblem(f"{name} contains NaN or infinity, or exceeds float32", hint="give finite numbers")
    return rows


def read_embeddings(path: Path) -> Array:
    """The embeddings in a `.npy` file, or one tensor of safetensors, float32 [tokens, hidden]; raises InputRefused."""
    if not path.is_file():
        raise InputRefused(f"the embeddings `{path}` are not a file", hint="give the path of a .npy or .safetensors")
    array = _safetensors(path) if path.suffix == ".safetensors" else _npy(path)
    try:
        return as_embeddings(array, f"`{path}`")
    except UsageProblem as error:
        raise InputRefused(error.message, hint=error.hint) from error


def _npy(path: Path) -> Array:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of numpy, about files of Python 2
            array = np.load(path, mmap_mode="r", allow_pickle=False)  # refuses a shape larger than the file
    except Exception as error:  # the header is text of Python, whose parser raises anything
        reason = first_line(error)
        raise MalformedInput(f"`{path}` is not a numpy array: {reason}", hint="save it again: `np.save`") from error
    if not isinstance(array, np.ndarray):
        raise MalformedInput(f"`{path}` is not a single array", hint="save one array: `np.save`")
    return array.view(ml_dtypes.bfloat16) if array.dtype == np.dtype("V2") else array


def _safetensors(path: Path) -> Array:
    tensors = read_header(path).tensors
    if len(tensors) != 1:
        raise InputRefused(f"`{path}` has {len(tensors)} tensors", hint="save one tensor: the embeddings")
    tensor = next(iter(tensors.values()))
    if problem := _form_problem(tensor.shape, tensor.dtype.name, tensor.dtype.name in FLOAT_NAMES):
        raise InputRefused(f"`{path}` {problem}", hint=FORM)
    return tensor.read()


FLOAT_NAMES = ("float16", "bfloat16", "float32", "float64")


def _form_problem(shape: tuple[int, ...], dtype: str, is_float: bool) -> str:
    """Why an array of that form is not embeddings; empty if it is."""
    if not is_float or len(shape) != 2 or 0 in shape:
        return f"has dtype {dtype} and shape {list(shape)}"
    return f"has {shape[0]} rows of {shape[1]} numbers, too many" if 4 * shape[0] * shape[1] > LARGEST else ""


def placed(ids: list[int], rows: Array, token: int | None, name: str) -> tuple[list[int], PromptEmbeddings]:
    """The tokens of a prompt with places for embeddings `rows` [count, hidden], and the embeddings in these places.

    `token`, whose places they take, must occur once, for all rows, or once per row (else InputRefused); None places the
    embeddings before the prompt.
    """
    count = len(rows)
    if token is None:
        return [0] * count + ids, PromptEmbeddings(np.arange(count), rows, before=count)
    found = ids.count(token)
    if found == 1:
        first = ids.index(token)
        ids = [*ids[:first], *[token] * count, *ids[first + 1 :]]
    elif found != count:
        problem = f"{name} has {found} placeholder tokens, and there are {count} embeddings"
        raise InputRefused(problem, hint="write the placeholder once, for all embeddings, or once per embedding")
    return ids, PromptEmbeddings(np.flatnonzero(np.array(ids) == token), rows)


def token_of(tokenizer: Any, placeholder: str) -> int:
    """The token id of a placeholder text; raises InputRefused if it is not one token of the vocabulary."""
    found = tokenizer.get_vocab().get(placeholder)
    if found is None:
        hint = "give a token of its vocabulary, or none: the embeddings then precede the prompt"
        raise InputRefused(f"the placeholder `{placeholder}` is not a token of the tokenizer", hint=hint)
    return int(found)


def require_size(size: int | None, rows: Array, why: str) -> None:
    """Raises LlmconvError unless embeddings [count, hidden] have the model's `size`; `why` if that is None."""
    if size is None:
        raise UsageProblem("the model takes tokens, and no embeddings", hint=why)
    if rows.shape[1] != size:
        problem = f"the embeddings have {rows.shape[1]} numbers per token, and those of the model {size}"
        raise InputRefused(problem, hint="were they made for another model?")


# numbers or nested lists by name of an extra input, without the axis of the batch; tokens are those of the prompt
RequestInputs = Mapping[str, Any]
# numpy's kinds of the numbers that an input of a dtype may be given as
KINDS = {"int64": "iu", "int32": "iu", "bool": "b", "float32": "fiu"}


def given_inputs(given: RequestInputs, tokens: int, known: Mapping[str, ExtraInput], name: str) -> GivenInputs:
    """The values of a prompt of `tokens` tokens, checked (InputRefused) against the resolved inputs `known`."""
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
        message = f"{prompt} gives `{input_name}` as lists of different lengths"
        raise InputRefused(message, hint="give one number for each element") from error
    if array.dtype.kind in KINDS[extra.dtype]:
        array = array.astype(BY_NAME[extra.dtype].numpy)
    without_batch = replace(extra, axes=tuple(axis for axis in extra.axes if axis != BATCH))
    ids = np.ones((1, tokens), dtype=np.int64)  # only their sizes count
    if problem := without_batch.misfit(array, ModelCall(ids, ids, ids)):
        hint = f"the prompt has {tokens} tokens" if extra.by_token else "see docs/adding-a-family.md"
        raise InputRefused(f"{prompt} gives `{input_name}` as {problem}", hint=hint)
    return array


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
            problem = f"`{name}` has one value for a batch, and its prompts differ"
            raise UsageProblem(problem, hint="give `--batch-size 1`")


def prompt_names(count: int) -> list[str]:
    return ["the prompt"] if count == 1 else [f"prompt {at}" for at in range(1, count + 1)]
