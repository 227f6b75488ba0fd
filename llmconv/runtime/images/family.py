"""ImageFamily: how the images of one family of models reach its graphs; the base takes images of one size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llmconv.runtime.images.processor import load_processor
from llmconv.tensors import Array

PIXEL_VALUES, IMAGE_FEATURES = "pixel_values", "image_features"

DEEPSTACK_FEATURES = "deepstack_features"
"""Further features, [tokens, layers * hidden], that are added to the outputs of the first layers of the decoder."""

Given = Mapping[str, Array]
"""Arrays by name: what the model's processor makes of the images of one prompt, or the inputs or outputs of the vision
graph in one run."""

CONTRASTS = (1.0, 0.1, 4.0)
"""Sizes of random pixel values: usual ones have a standard deviation of 1."""


@dataclass(frozen=True)
class Features:
    """The features of the images of one prompt.

    Attributes:
        rows: float [tokens, hidden], in the order of their placeholder tokens.
        outputs: of the vision graph by name, for each of its runs.
    """

    rows: Array
    outputs: Sequence[Given] = ()


class ImageFamily:
    """Images of one size, with equally many features each, which attend and are attended to as tokens do.

    A family that differs is a subclass in a file of this folder and a row in `families`.

    Args:
        config: the whole model's transformers config.
    """

    read_whole = False
    """Whether a prompt with images must be read in one run, because a feature attends to later features."""

    counts_positions = True
    """Whether tokens and features have the positions 0, 1, …; if not, the whole model computes them from the images."""

    start_token: int | None = None
    """The token that starts an image, where the processor expands that one instead of the placeholder."""

    tensors = "np"
    """What the processor returns: arrays, or tensors of torch (`pt`) where it makes bfloat16."""

    def __init__(self, config: Any) -> None:
        self.config = config

    # --- running ------------------------------------------------------------------------------------------------------

    def load_processor(self, folder: Path) -> Any:
        """transformers' processor of the model, or one that returns the same for texts and images.

        Args:
            folder: has its files and those of the tokenizer.

        Raises:
            Exception: of any class; transformers cannot read the files, or needs a library that is not installed.
        """
        return load_processor(folder, self.config)

    def with_images_by(self, processor: Any, images: Any) -> Any:
        """A processor that prepares images by another image processor.

        Args:
            processor: of `load_processor`; it may be changed.
            images: an image processor of transformers.
        """
        processor.image_processor = images
        return processor

    def text_of_image(self, placeholder: str, processor: Any) -> str:
        """The text of one image in a prompt that the caller writes no placeholders into.

        Args:
            placeholder: text of the token that a processor repeats for each feature.
            processor: of transformers.
        """
        return f"{placeholder}\n"

    def marker(self, processor: Any, placeholder: str) -> str:
        """The text that stands for one image in a prompt, before the processor expands it.

        Args:
            processor: of transformers.
            placeholder: see `text_of_image`.
        """
        return placeholder

    def runs(self, given: Given) -> Iterator[Given]:
        """The inputs of the vision graph by name, for each of its runs.

        Args:
            given: what the processor made of the images of one prompt.
        """
        yield {PIXEL_VALUES: given[PIXEL_VALUES]}

    def rows(self, outputs: Sequence[Given], given: Given) -> Array:
        """Features, float [tokens, hidden], in the order of their placeholder tokens.

        Args:
            outputs: of the vision graph by name, for each of its runs.
            given: see `runs`.
        """
        parts = [one[IMAGE_FEATURES] for one in outputs]
        return np.concatenate([part.reshape(-1, part.shape[-1]) for part in parts])

    def features(self, run: Callable[[Given], Given], given: Given) -> Features:
        """The features of the images of one prompt.

        Args:
            run: runs the vision graph.
            given: see `runs`.
        """
        outputs = [run(one) for one in self.runs(given)]
        return Features(self.rows(outputs, given), outputs)

    def inputs(self, where: Array, features: Features, given: Given) -> dict[str, Array]:
        """Values of the decoder's extra inputs for one prompt by name, without the axis of the batch.

        Args:
            where: which tokens of the prompt are placeholders, bool [tokens].
            features: of its images.
            given: see `runs`.
        """
        return {}

    # --- verification -------------------------------------------------------------------------------------------------

    def examples(self, shape: Sequence[int | str], random: np.random.Generator) -> list[Given]:
        """Random images as a processor returns them: of a prompt with one image, of one with two, and others.

        Args:
            shape: of `pixel_values` as the vision graph declares it.
            random: draws the pixels; equal shapes for equal shapes of images, whatever it draws.
        """
        size = [int(axis) for axis in shape[1:]]
        kinds = [(1, 1.0), (2, 1.0), *((count, contrast) for contrast in CONTRASTS for count in (1, 3))]
        return [{PIXEL_VALUES: random.standard_normal((count, *size)) * contrast} for count, contrast in kinds]

    def features_of(self, given: Given, graph_tokens: int) -> list[int]:
        """Number of features of each image.

        Args:
            given: see `runs`.
            graph_tokens: number of features of an image that the vision graph declares; 0 if that is dynamic.
        """
        return [graph_tokens] * len(given[PIXEL_VALUES])

    def model_inputs(self, where: Array, given: Given) -> dict[str, Array]:
        """What the whole eager model takes besides tokens, mask and positions, by name.

        Args:
            where: which tokens are placeholders, bool [batch, tokens].
            given: as for `runs`, of all prompts of the batch together.
        """
        return dict(given)
