"""VisionGraph: the vision tower and projector of a multimodal model, pixels to features."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from llmconv.errors import InputRefused, LlmconvError, MalformedInput, first_line
from llmconv.output.manifest import read_manifest
from llmconv.runtime.images.family import IMAGE_FEATURES, PIXEL_VALUES, Given
from llmconv.runtime.onnxruntime.graph_entry import VISION_ROLE
from llmconv.runtime.onnxruntime.session_settings import TENSOR_DTYPES, SessionSettings, as_array
from llmconv.runtime.onnxruntime.shared_buffers import as_input
from llmconv.runtime.onnxruntime.staged_session import SessionChain
from llmconv.tensors import Array

VISION = "vision.onnx"


def has_vision(folder: Path) -> bool:
    """Whether the manifest of a folder lists the graph of a vision tower, or the folder has one and no manifest."""
    listed = read_manifest(folder).graphs
    return VISION_ROLE in listed if listed else (folder / VISION).is_file()


class VisionGraph:
    """Maps `pixel_values`, and in some families their sizes, to `image_features`.

    `shape` is that of `pixel_values` as declared, [images, channels, height, width] for images of one size; `tokens`
    the number of features of one image, 0 if that depends on the image. Raises MalformedInput for another kind of
    graph, or if `guard` or onnxruntime refuses it.
    """

    def __init__(self, path: Path, settings: SessionSettings | None = None) -> None:
        self._session = SessionChain([path], settings or SessionSettings(), joins=False).last
        self._inputs = {arg.name: arg for arg in self._session.get_inputs()}
        outputs = {arg.name: arg for arg in self._session.get_outputs()}
        if PIXEL_VALUES not in self._inputs or IMAGE_FEATURES not in outputs:
            raise MalformedInput(
                f"`{path.name}` is not a graph of `{PIXEL_VALUES}` to `{IMAGE_FEATURES}`",
                hint="run `llmconv export` again",
            )
        self.shape: tuple[int | str, ...] = tuple(self._inputs[PIXEL_VALUES].shape)
        declared = outputs[IMAGE_FEATURES].shape
        self.tokens = int(declared[1]) if len(declared) == 3 and isinstance(declared[1], int) else 0
        self._name, self._results = path.name, list(outputs)

    def run(self, given: Given) -> dict[str, Array]:
        """The outputs by name; floats among the inputs are cast to the dtype of the graph.

        Raises InputRefused for images of another shape, MalformedInput if onnxruntime cannot run the graph on these
        inputs.
        """
        if given.keys() != self._inputs.keys():
            raise MalformedInput(
                f"`{self._name}` takes {', '.join(self._inputs)}, and not {', '.join(given)}",
                hint="run `llmconv export` again",
            )
        feeds = {name: as_input(self._fitted(name, array)) for name, array in given.items()}
        try:
            results = self._session.run_with_ort_values(self._results, feeds)
        except LlmconvError:
            raise
        except Exception as error:  # onnxruntime's exceptions share no base class of their own
            raise MalformedInput(
                f"`{self._name}` fails in onnxruntime: {first_line(error)}", hint="run `llmconv verify` on the folder"
            ) from error
        return {name: as_array(value) for name, value in zip(self._results, results, strict=True)}

    def _fitted(self, name: str, array: Array) -> Array:
        """An input in the graph's dtype, its shape checked."""
        declared = self._inputs[name]
        axes = list(zip(declared.shape, array.shape, strict=False))
        if array.ndim != len(declared.shape) or any(isinstance(axis, int) and axis != size for axis, size in axes):
            raise InputRefused(
                f"`{self._name}` takes `{name}` {list(declared.shape)}, not {list(array.shape)}",
                hint="the processor in the folder prepares images of another size than `config.json` has",
            )
        return np.ascontiguousarray(array, dtype=TENSOR_DTYPES.get(declared.type, array.dtype))
