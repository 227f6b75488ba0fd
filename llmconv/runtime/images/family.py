"""ImageFamily: how the images of one family of models reach its graphs; the base takes images of one size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partialmethod
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import numpy as np

from llmconv.checkpoint import read_json
from llmconv.runtime.extra_inputs import IMAGE_FEATURES, PIXEL_VALUES
from llmconv.runtime.tokenizer import require_small_template
from llmconv.tensors import Array

Given = Mapping[str, Array]
"""Arrays by name: what the model's processor makes of the images of one prompt, or the inputs or outputs of the vision
graph in one run."""

CONTRASTS = (1.0, 0.1, 4.0)  # sizes of random pixel values: usual ones have a standard deviation of 1


@dataclass(frozen=True)
class Features:
    """The features of the images of one prompt."""

    rows: Array  # float [tokens, hidden], in the order of their placeholder tokens
    outputs: Sequence[Given] = ()  # those of the vision graph by name, for each of its runs


class ImageFamily:
    """Images of one size, with equally many features each, which attend and are attended to as tokens do.

    A family that differs is a subclass in a file of this folder and a row in `families`. `config` is the whole model's
    transformers config; `given` in the methods is what the processor made of the images of one prompt.
    """

    read_whole = False
    """Whether a prompt with images must be read in one run, because a feature attends to later features."""

    counts_positions = True
    """Whether tokens and features have the positions 0, 1, …; if not, the whole model computes them from the images."""

    start_token: int | None = None
    """The token that starts an image, where the processor expands that one instead of the placeholder."""

    tensors = "np"  # what the processor returns: arrays, or tensors of torch (`pt`) where it makes bfloat16

    def __init__(self, config: Any) -> None:
        self.config = config

    # --- running ------------------------------------------------------------------------------------------------------

    def load_processor(self, folder: Path) -> Any:
        """transformers' processor of the model, or one that returns the same; any Exception if it cannot be read."""
        return load_processor(folder, self.config)

    def with_images_by(self, processor: Any, images: Any) -> Any:
        """The processor of `load_processor`, perhaps changed, with another image processor of transformers."""
        processor.image_processor = images
        return processor

    after_image = "\n"  # what follows the placeholder of an image that is put before a prompt; empty in chat templates

    def text_of_image(self, placeholder: str, processor: Any) -> str:
        """The text of one image in a prompt without placeholders, whose token the processor repeats per feature."""
        return placeholder + self.after_image

    def marker(self, processor: Any, placeholder: str) -> str:
        """The text that stands for one image in a prompt, before the processor expands it."""
        return placeholder

    def runs(self, given: Given) -> Iterator[Given]:
        """The inputs of the vision graph by name, for each of its runs."""
        yield {PIXEL_VALUES: given[PIXEL_VALUES]}

    def rows(self, outputs: Sequence[Given], given: Given) -> Array:
        """Float [tokens, hidden] in the order of placeholders, from the vision graph's outputs by name of each run."""
        parts = [one[IMAGE_FEATURES] for one in outputs]
        return np.concatenate([part.reshape(-1, part.shape[-1]) for part in parts])

    def features(self, run: Callable[[Given], Given], given: Given) -> Features:
        """The features of the images of one prompt; `run` runs the vision graph."""
        outputs = [run(one) for one in self.runs(given)]
        return Features(self.rows(outputs, given), outputs)

    def inputs(self, where: Array, features: Features, given: Given) -> dict[str, Array]:
        """Values of extra inputs for one prompt by name, without the batch; `where`, bool [tokens]: placeholders."""
        return {}

    # --- verification -------------------------------------------------------------------------------------------------

    def examples(self, shape: Sequence[int | str], random: np.random.Generator) -> list[Given]:
        """Random images as a processor's: prompts with one, two, others; `shape` of `pixel_values` as declared."""
        size = [int(axis) for axis in shape[1:]]
        kinds = [(1, 1.0), (2, 1.0), *((count, contrast) for contrast in CONTRASTS for count in (1, 3))]
        return [{PIXEL_VALUES: random.standard_normal((count, *size)) * contrast} for count, contrast in kinds]

    def features_of(self, given: Given, graph_tokens: int) -> list[int]:
        """Number of features of each image; `graph_tokens` is what the vision graph declares, 0 if dynamic."""
        return [graph_tokens] * len(given[PIXEL_VALUES])

    def model_inputs(self, where: Array, given: Given) -> dict[str, Array]:
        """What the whole eager model takes for a batch in addition to tokens, mask and positions, by name.

        `where`, bool [batch, tokens], marks placeholders; `given` is that of all prompts together.
        """
        return dict(given)


PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")  # files that name the class of a processor


def load_processor(folder: Path, config: Any) -> Any:
    """The processor of a model; raises as `ImageFamily.load_processor`."""
    from transformers import PROCESSOR_MAPPING, AutoProcessor  # noqa: PLC0415 - imports torch
    from transformers.utils import is_torchvision_available  # noqa: PLC0415

    require_small_template(folder)
    kind: Any = AutoProcessor
    known = _named_class(folder) or PROCESSOR_MAPPING.get(type(config), None)
    if not is_torchvision_available() and known and "video_processor" in known.get_attributes():
        kind = without_videos(known)
    return kind.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def _named_class(folder: Path) -> Any:
    """The class that the folder's files name; a model may have the processor of another family."""
    import transformers  # noqa: PLC0415

    for path in (folder / name for name in PROCESSOR_FILES):
        named = read_json(path).get("processor_class") if path.is_file() else None
        if isinstance(named, str) and named.endswith("Processor"):
            return getattr(transformers, named, None)
    return None


def without_videos(kind: Any) -> Any:
    """A class of transformers' processors without its processor of videos, which needs torchvision."""

    def get_attributes(cls: Any) -> list[str]:
        return [name for name in kind.get_attributes.__func__(cls) if name != "video_processor"]

    members: dict[str, Any] = {"get_attributes": classmethod(get_attributes), "__module__": kind.__module__}
    if signature(kind.__init__).parameters["video_processor"].default is Parameter.empty:
        members["__init__"] = partialmethod(kind.__init__, video_processor=None)
    return type(kind.__name__, (kind,), members)


# by `model_type`: fields of the config with the tokens that are embedded as padding until features replace them
EMBEDDED_AS_PADDING = {"gemma4": ("image_token_id", "video_token_id", "audio_token_id")}


def placeholders(config: Any) -> tuple[int, ...]:
    """The tokens that a model embeds as padding; none for most."""
    found = (getattr(config, name, None) for name in EMBEDDED_AS_PADDING.get(config.model_type, ()))
    return tuple(token for token in found if token is not None)


def as_embedded(input_ids: Array, config: Any) -> Array:
    """The tokens whose embeddings the model reads for `input_ids`, both int64 [batch, tokens]."""
    if not (tokens := placeholders(config)):
        return input_ids
    return np.where(np.isin(input_ids, tokens), config.get_text_config(decoder=True).pad_token_id, input_ids)
