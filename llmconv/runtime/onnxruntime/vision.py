"""VisionGraph: the vision tower and projector of a multimodal model, pixels to features."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from llmconv.errors import InputRefused, LlmconvError, MalformedInput, first_line
from llmconv.output.manifest import read_manifest
from llmconv.runtime.onnxruntime.device import TENSOR_DTYPES, as_array
from llmconv.runtime.onnxruntime.graph_entry import VISION_ROLE
from llmconv.runtime.onnxruntime.io_binding import as_input
from llmconv.runtime.onnxruntime.session_settings import SessionSettings
from llmconv.runtime.onnxruntime.staged_session import SessionChain
from llmconv.tensors import Array

VISION = "vision.onnx"
PIXEL_VALUES, IMAGE_FEATURES = "pixel_values", "image_features"


def has_vision(folder: Path) -> bool:
    """Whether the manifest of a folder lists the graph of a vision tower, or the folder has one and no manifest."""
    listed = read_manifest(folder).graphs
    return VISION_ROLE in listed if listed else (folder / VISION).is_file()


class VisionGraph:
    """Maps `pixel_values` to `image_features`.

    Attributes:
        shape: of one image: channels, height, width.
        tokens: number of features of one image.

    Args:
        path: file of the graph.
        settings: session settings; onnxruntime's defaults if None.

    Raises:
        MalformedInput: the file is refused, see `guard`, onnxruntime cannot open it, or it is not a vision graph.
    """

    def __init__(self, path: Path, settings: SessionSettings | None = None) -> None:
        self._session = SessionChain([path], settings or SessionSettings(), joins=False).last
        inputs = {arg.name: arg for arg in self._session.get_inputs()}
        outputs = {arg.name: arg for arg in self._session.get_outputs()}
        if inputs.keys() != {PIXEL_VALUES} or IMAGE_FEATURES not in outputs:
            raise MalformedInput(
                f"`{path.name}` is not a graph of `{PIXEL_VALUES}` to `{IMAGE_FEATURES}`",
                hint="run `llmconv export` again",
            )
        given = inputs[PIXEL_VALUES]
        self.shape, self._dtype = tuple(given.shape[1:]), TENSOR_DTYPES.get(given.type, np.float32)
        self.tokens = outputs[IMAGE_FEATURES].shape[1]
        self._name = path.name

    def run(self, pixel_values: Array) -> Array:
        """Features, float [images, tokens, hidden], of `pixel_values`, float [images, channels, height, width].

        Raises:
            InputRefused: images of another shape.
            MalformedInput: onnxruntime cannot run the graph.
        """
        if pixel_values.ndim != 4 or pixel_values.shape[1:] != self.shape:
            raise InputRefused(
                f"`{self._name}` takes images {list(self.shape)}, not {list(pixel_values.shape[1:])}",
                hint="the processor in the folder prepares images of another size than `config.json` has",
            )
        pixels = np.ascontiguousarray(pixel_values, dtype=self._dtype)
        try:
            (features,) = self._session.run_with_ort_values([IMAGE_FEATURES], {PIXEL_VALUES: as_input(pixels)})
        except LlmconvError:
            raise
        except Exception as error:  # onnxruntime's exceptions share no base class of their own
            raise MalformedInput(
                f"`{self._name}` fails in onnxruntime: {first_line(error)}", hint="run `llmconv verify` on the folder"
            ) from error
        return as_array(features)
