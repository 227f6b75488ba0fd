"""The one small file that a prefix adds to a folder: what was trained, and the keys and values that graphs map."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from llmconv.export.prefix.adapter import KeyValue, Prefix
from llmconv.export.prefix.virtual_tokens import keys_and_values, require_width
from llmconv.export.rewrite.passes.prefix import cache_shapes, prepend_prefix
from llmconv.files.safetensors_file import encode_header
from llmconv.tensors import BY_NAME, Array

TRAINED = "adapter"
"""The tensor that was trained, as the adapter has it; the verifier computes its own keys and values from it."""


def require_fit(prefix: Prefix, model: ir.Model) -> None:
    """Refuses a prefix of another model.

    Raises:
        InputRefused: its shapes are not the model's.
        UnsupportedInput: the model keeps something else than keys and values.
    """
    shapes = cache_shapes(model.graph)
    if prefix.kind == "soft_prompt":
        require_width(model.graph, prefix.content.shape[1])
    else:
        prefix.keys_and_values(shapes)


@dataclass(frozen=True)
class PrefixFile:
    """A safetensors file of float32 tensors: `adapter`, then `prefix.{i}.key` and `prefix.{i}.value` by layer.

    Attributes:
        name: with a part of the content's hash, so that graphs of several prefixes may share a folder.
        content: the file's bytes.
        places: offset and shape of the keys and values by what they hold: `0.key`, `0.value`, …
    """

    prefix: Prefix
    name: str
    content: bytes
    places: dict[str, tuple[int, tuple[int, ...]]]

    @classmethod
    def make(cls, prefix: Prefix, model: ir.Model, folder: Path) -> PrefixFile:
        """The file of a prefix for one model.

        Args:
            prefix: as it was trained.
            model: the decoder, bound to weights in `folder`.
            folder: of the weights.

        Raises:
            InputRefused: the prefix is of another model.
        """
        if prefix.kind == "soft_prompt":
            layers = keys_and_values(model, prefix.content, folder)
        else:
            layers = prefix.keys_and_values(cache_shapes(model.graph))
        return cls._of(prefix, layers)

    @classmethod
    def _of(cls, prefix: Prefix, layers: list[KeyValue]) -> PrefixFile:
        arrays: dict[str, Array] = {TRAINED: prefix.content}
        for layer, (key, value) in enumerate(layers):
            arrays |= {f"prefix.{layer}.key": key[None], f"prefix.{layer}.value": value[None]}
        header = encode_header({name: (BY_NAME["float32"], array.shape) for name, array in arrays.items()})
        places, position = {}, len(header)
        for name, array in arrays.items():
            places[name.removeprefix("prefix.")] = (position, array.shape)
            position += array.nbytes
        del places[TRAINED]
        content = header + b"".join(np.ascontiguousarray(array).tobytes() for array in arrays.values())
        return cls(prefix, f"prefix-{hashlib.sha256(content).hexdigest()[:8]}.safetensors", content, places)

    def prepend(self, model: ir.Model) -> None:
        """Makes a graph begin with the prefix."""
        tensors = {
            what: ir.ExternalTensor(
                self.name,
                offset,
                4 * int(np.prod(shape)),
                ir.DataType.FLOAT,
                shape=ir.Shape(shape),
                name=f"prefix.{what}",
            )
            for what, (offset, shape) in self.places.items()
        }
        prepend_prefix(model, tensors, self.prefix.first_position)

    def recorded(self) -> dict[str, Any]:
        """What the manifest says of a graph that begins with the prefix."""
        prefix = self.prefix
        fields = {"file": self.name, "kind": prefix.kind, "length": prefix.length}
        return {"prefix": {**fields, "first_position": prefix.first_position}}
