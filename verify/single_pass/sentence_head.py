"""What follows the last hidden state of an embedding model, in numpy: a second implementation, which shares no code.

The files are those of sentence-transformers 6.2 (`modules.json` and a folder for each module).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from math import erf
from pathlib import Path
from typing import Any

import numpy as np

from llmconv.checkpoint import SINGLE, read_small
from llmconv.errors import MalformedInput, UnsupportedInput
from llmconv.files.safetensors_file import FileTensor, read_header
from llmconv.tensors import Array

MODULES = "modules.json"
POOLING, DENSE, NORMALIZE, SCORE = "Pooling", "Dense", "Normalize", "LogitScore"
KINDS = {"Transformer", "Dropout", POOLING, DENSE, NORMALIZE, SCORE}


class Modules:
    """The modules of a folder; none without a `modules.json`.

    Attributes:
        listed: kind, folder and configuration of every module, in order.

    Args:
        folder: of the model.

    Raises:
        MalformedInput: a file is not what sentence-transformers writes.
        UnsupportedInput: a module of another kind, or with an option that is not computed here.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            entries = json.loads(read_small(folder / MODULES)) if (folder / MODULES).is_file() else []
            found = [(entry["type"].split(".")[-1], entry["path"]) for entry in entries]
            self.listed = [(kind, path, self._config(path)) for kind, path in found]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise MalformedInput(f"`{MODULES}` is not valid: {error}", hint="copy the model's folder again") from error
        for kind, path, config in self.listed:
            if kind not in KINDS or config.get("use_residual") or config.get("include_prompt") is False:
                raise UnsupportedInput(
                    f"`verify` does not know what the module `{path or kind}` of `{MODULES}` computes",
                    hint="docs/embeddings.md lists the modules",
                )

    def _config(self, path: str) -> dict[str, Any]:
        file = self._folder / path / "config.json"
        content: dict[str, Any] = json.loads(read_small(file)) if path and file.is_file() else {}
        return content

    def has(self, kind: str) -> bool:
        """Whether there is a module of this kind."""
        return any(one == kind for one, _, _ in self.listed)

    def tensors(self) -> dict[str, FileTensor]:
        """Weights of the modules after the model, as `2_Dense.linear.weight`."""
        found = {}
        for kind, path, _ in self.listed:
            name = f"{path}/{SINGLE}"
            if kind == DENSE and (self._folder / name).is_file():
                for key, one in read_header(self._folder / name).tensors.items():
                    found[f"{path}.{key}"] = FileTensor(one.path, one.offset, one.dtype, one.shape, location=name)
        return found

    def embedding(self, hidden: Array, mask: Array) -> Array:
        """The embeddings [batch, features], in the dtype of the hidden state [batch, tokens, hidden]."""
        rows, weights = hidden, {name: tensor.read().astype(hidden.dtype) for name, tensor in self.tensors().items()}
        for kind, path, config in self.listed:
            if kind == POOLING:
                rows = np.concatenate([_pooled(mode, hidden, mask) for mode in _modes(config)], axis=-1)
            elif kind == DENSE:
                product = rows @ weights[f"{path}.linear.weight"].T
                product = product + weights.get(f"{path}.linear.bias", np.zeros((), hidden.dtype))
                rows = ACTIVATIONS[config.get("activation_function", "…Tanh").split(".")[-1]](product)
            elif kind == NORMALIZE:
                rows = rows / np.maximum(np.sqrt((rows * rows).sum(-1, keepdims=True)), hidden.dtype.type(1e-12))
        return rows.astype(hidden.dtype)

    def score(self, logits: Array, mask: Array) -> Array:
        """The scores of a reranker [batch], from logits [batch, tokens, vocab]."""
        config = next(config for kind, _, config in self.listed if kind == SCORE)
        rows = np.stack([row[np.flatnonzero(real)[-1]] for row, real in zip(logits, mask, strict=True)])
        found: Array = rows[:, config["true_token_id"]]
        return found if config.get("false_token_id") is None else found - rows[:, config["false_token_id"]]


def _modes(config: dict[str, Any]) -> list[str]:
    if (given := config.get("pooling_mode")) is not None:
        return given if isinstance(given, list) else [given]
    old = ["cls_token", "max_tokens", "mean_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken"]
    modes = [name for name in old if config.get(f"pooling_mode_{name}")] or ["mean"]
    return [name if "sqrt" in name else name.removesuffix("_tokens").removesuffix("_token") for name in modes]


def _pooled(mode: str, hidden: Array, mask: Array) -> Array:
    """One vector per text, from its real tokens alone."""
    return np.stack([_of_text(mode, row[real != 0]) for row, real in zip(hidden, mask, strict=True)])


def _of_text(mode: str, tokens: Array) -> Array:
    """The vector of the tokens [tokens, hidden] of one text."""
    count = len(tokens)
    if mode == "weightedmean":
        averaged: Array = np.average(tokens, axis=0, weights=np.arange(1, count + 1))
        return averaged
    results: dict[str, Callable[[], Any]] = {
        "cls": lambda: tokens[0],
        "lasttoken": lambda: tokens[-1],
        "max": lambda: tokens.max(axis=0),
        "mean": lambda: tokens.mean(axis=0),
        "mean_sqrt_len_tokens": lambda: tokens.sum(axis=0) / np.sqrt(count).astype(tokens.dtype),
    }
    found: Array = results[mode]()
    return found


def _gelu(x: Array) -> Array:
    both: Array = np.vectorize(erf)(x / np.sqrt(2)) + 1
    return np.asarray(x * 0.5 * both, dtype=x.dtype)


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "Identity": lambda x: x,
    "Tanh": np.tanh,
    "ReLU": lambda x: np.maximum(x, 0),
    "GELU": _gelu,
    "Sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "SiLU": lambda x: x / (1 + np.exp(-x)),
}
