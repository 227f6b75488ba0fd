"""EncodedPrompt: the tokens of a prompt, and the embeddings that take the places of some of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from llmconv.errors import InputRefused, LlmconvError, MalformedInput, UsageProblem, first_line
from llmconv.files.paths import kind_of
from llmconv.files.safetensors_file import read_header
from llmconv.generation.prompts import Prompt
from llmconv.runtime.runner import PromptEmbeddings
from llmconv.tensors import Array


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as a model takes it: tokens, and None or a function for embeddings in place of those of some tokens.

    The function reads or computes them, so that those of many prompts need not be in memory at a time.
    """

    ids: list[int]
    embeddings: Callable[[], PromptEmbeddings] | None = None


def with_embeddings(prompt: Prompt, ids: list[int], tokenizer: Any, name: str = "the prompt") -> EncodedPrompt:
    """A prompt with its own embeddings, placed among the tokens `ids` of its text; raises as `rows_of` and `placed`."""
    token = token_of(tokenizer, prompt.placeholder) if prompt.placeholder else None
    tokens = placed(ids, rows_of(prompt.embeddings), token, name)[0]
    return EncodedPrompt(tokens, lambda: placed(ids, rows_of(prompt.embeddings), token, name)[1])


def rows_of(embeddings: Any) -> Any:
    """Embeddings, float32 [tokens, hidden], from an array, a torch tensor, or a file; raises as `read_embeddings`."""
    return read_embeddings(Path(embeddings)) if isinstance(embeddings, str | Path) else as_embeddings(embeddings)


FORM = "give an array of floats [tokens, hidden]"

LARGEST = 1 << 30
"""Maximum number of bytes of the embeddings of one prompt, in float32."""


def as_embeddings(value: Any, name: str = "`embeddings`") -> Array:
    """An array or a torch tensor of floats as embeddings, float32 [tokens, hidden].

    Raises UsageProblem for another shape or dtype, a size that is too large, or values not finite in float32.
    """
    if hasattr(value, "detach"):  # a tensor; numpy has no bfloat16
        value = value.detach().float().cpu()
    if not hasattr(value, "__array__"):
        raise UsageProblem(f"{name} is {kind_of(value)}, not an array", hint=FORM)
    array = np.asarray(value)
    if problem := _problem(array):
        raise UsageProblem(f"{name} {problem}", hint=FORM)
    rows = _float32(array)
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


def _problem(array: Array) -> str:
    return _form_problem(array.shape, str(array.dtype), array.dtype.kind == "f" or array.dtype == ml_dtypes.bfloat16)


def _form_problem(shape: tuple[int, ...], dtype: str, is_float: bool) -> str:
    """Why an array of that form is not embeddings; empty if it is."""
    if not is_float or len(shape) != 2 or 0 in shape:
        return f"has dtype {dtype} and shape {list(shape)}"
    return f"has {shape[0]} rows of {shape[1]} numbers, too many" if 4 * shape[0] * shape[1] > LARGEST else ""


def _float32(array: Array) -> Array:
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(array, dtype=np.float32)


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
        raise InputRefused(
            f"{name} has {found} placeholder tokens, and there are {count} embeddings",
            hint="write the placeholder once, for all embeddings, or once per embedding",
        )
    return ids, PromptEmbeddings(np.flatnonzero(np.array(ids) == token), rows)


def token_of(tokenizer: Any, placeholder: str) -> int:
    """The token id of a placeholder text; raises InputRefused if it is not one token of the vocabulary."""
    found = tokenizer.get_vocab().get(placeholder)
    if found is None:
        raise InputRefused(
            f"the placeholder `{placeholder}` is not a token of the tokenizer",
            hint="give a token of its vocabulary, or none: the embeddings then precede the prompt",
        )
    return int(found)


def require_size(size: int | None, rows: Array, why: str) -> None:
    """Raises LlmconvError if embeddings `rows` [count, hidden] do not have the `size` that a model takes.

    None is the size of a model that takes tokens only; then `why` is the way out.
    """
    problem: LlmconvError | None = None
    if size is None:
        problem = UsageProblem("the model takes tokens, and no embeddings", hint=why)
    elif rows.shape[1] != size:
        problem = InputRefused(
            f"the embeddings have {rows.shape[1]} numbers per token, and those of the model {size}",
            hint="were they made for another model?",
        )
    if problem:
        raise problem
