"""The safetensors file that a prefix adds to a folder: the trained tensor, and the keys and values that graphs map."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from llmconv.export.prefix.virtual_tokens import keys_and_values
from llmconv.export.rewrite.passes.prefix import cache_shapes, prepend_prefix
from llmconv.export.traced_graph import TracedGraph
from llmconv.export.weights.parameter_sources import WeightSource
from llmconv.files.safetensors_file import FileTensor, encode_header
from llmconv.runtime.prefix.trained import Prefix
from llmconv.tensors import BY_NAME, Array

TRAINED = "adapter"
"""Name of the trained tensor of the adapter; the verifier computes its own keys and values from it."""


@dataclass(frozen=True)
class PrefixFile:
    """A safetensors file of float32 tensors: `adapter`, then `prefix.{i}.key` and `prefix.{i}.value` by layer.

    Attributes:
        prefix: the trained prefix.
        name: file name; contains part of the content's hash, so that graphs of several prefixes may share a folder.
        content: the file's bytes.
        places: offset and shape of each key and value: `0.key`, `0.value`, …
    """

    prefix: Prefix
    name: str
    content: bytes
    places: dict[str, tuple[int, tuple[int, ...]]]

    @classmethod
    def make(
        cls,
        prefix: Prefix,
        traced: TracedGraph,
        matches: Mapping[str, WeightSource],
        sources: Mapping[str, FileTensor],
        weights: Mapping[str, FileTensor],
    ) -> PrefixFile:
        """The file of a prefix for one model.

        Args:
            prefix: the trained prefix.
            traced: the decoder's graph, not bound to weights yet.
            matches: the stored tensors of each of its weights.
            sources: the tensors in files that can be read; only a soft prompt reads them.
            weights: the tensors with the dtypes in which the graph will map them.

        Raises:
            InputRefused: the prefix is of another model.
            UnsupportedInput: the model keeps more than keys and values.
        """
        shapes = cache_shapes(traced.model.graph)
        if prefix.kind == "soft_prompt":
            layers = keys_and_values(traced, matches, sources, weights, prefix.content)
        else:
            layers = prefix.keys_and_values(shapes)
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
        """Puts the prefix before every prompt of a graph, in place."""
        tensors = {
            name: ir.ExternalTensor(
                self.name,
                offset,
                4 * int(np.prod(shape)),
                ir.DataType.FLOAT,
                shape=ir.Shape(shape),
                name=f"prefix.{name}",
            )
            for name, (offset, shape) in self.places.items()
        }
        prepend_prefix(model, tensors, self.prefix.first_position)

    def manifest_fields(self) -> dict[str, Any]:
        """Fields of the manifest entry of a graph with this prefix."""
        prefix = self.prefix
        fields = {"file": self.name, "kind": prefix.kind, "length": prefix.length}
        return {"prefix": {**fields, "first_position": prefix.first_position}}
