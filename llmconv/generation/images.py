"""ImageEncoder: prompts with images become tokens and features, by the model's own processor and vision tower."""

from __future__ import annotations

import importlib
import io
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from llmconv.errors import InputRefused, UsageProblem, first_line
from llmconv.files.paths import kind_of
from llmconv.generation.prompts import EncodedPrompt
from llmconv.runtime.images.family import PROCESSOR_FILES, Features, Given, ImageFamily
from llmconv.runtime.runner import PromptEmbeddings
from llmconv.runtime.tokenizer import token_ids
from llmconv.tensors import Array

TEXT_INPUTS = ("input_ids", "attention_mask")  # what a processor makes of the text; the rest is of the images
# packages that the processors of some models need, and what to do
INSTALLED = {"torchvision": "install the torchvision that fits your torch", "num2words": "pip install num2words"}
OTHER_MODEL = "the processor's files are of another model than `config.json`"
MOST_IMAGES = 16  # maximum number of images in a prompt
ImageFeatures = Callable[[Given], Features]  # what the processor makes of the images of one prompt, to their features


@dataclass(frozen=True)
class ImageEncoder:
    """Prepares prompts with images."""

    folder: Path  # has the processor's files and `config.json`
    family: ImageFamily
    open_features: Callable[[], ImageFeatures] = field(repr=False)  # opens the vision tower; cached by the caller
    image_processor: Any = None  # of transformers, in place of the folder's

    @cached_property
    def processor(self) -> Any:
        """transformers' processor of the model; raises InputRefused if the folder has none, or an unreadable one."""
        if not any((self.folder / name).is_file() for name in PROCESSOR_FILES):
            hint = f"copy {' or '.join(PROCESSOR_FILES)} of the original model into the folder"
            raise InputRefused(f"`{self.folder}` has no processor of images", hint=hint)
        from transformers.utils import logging  # noqa: PLC0415 - imports torch

        level = logging.get_verbosity()
        logging.set_verbosity_error()  # it announces which library resizes images
        try:
            found = self.family.load_processor(self.folder)
            return found if self.image_processor is None else self.family.with_images_by(found, self.image_processor)
        except Exception as error:  # an invalid config may raise anything
            raise _refused(f"the processor in `{self.folder}` cannot be read", error) from error
        finally:
            logging.set_verbosity(level)

    @cached_property
    def token(self) -> int:
        """The placeholder token whose embeddings the features replace."""
        found = getattr(self.family.config, "image_token_id", None)
        found = getattr(self.processor, "image_token_id", None) if found is None else found
        if not isinstance(found, int):
            raise InputRefused("`config.json` has no `image_token_id`", hint="copy the config of the original model")
        return found

    @property
    def placeholder(self) -> str:
        """Text of the placeholder token; raises InputRefused if the tokenizer has no such token."""
        known = 0 <= self.token < 1 << 32  # the tokenizer's numbers have 32 bits
        text: str | None = self.processor.tokenizer.convert_ids_to_tokens(self.token) if known else None
        if text is None:
            raise InputRefused(
                f"the placeholder of images is the token {self.token}, which the tokenizer does not have",
                hint="`config.json` and the tokenizer's files are of different models: copy both again",
            )
        return text

    @cached_property
    def marker(self) -> str:
        """Text that stands for one image in a prompt; InputRefused for another processor, or a tokenizer without it."""
        try:
            return self.family.marker(self.processor, self.placeholder)
        except AttributeError as error:
            raise InputRefused(f"the processor of images does not fit the model: {error}", hint=OTHER_MODEL) from error

    def encode(self, text: str, images: Sequence[Any], *, starts: bool, most: int | None = None) -> EncodedPrompt:
        """A prompt with images (paths, bytes, or images of Pillow) as the model takes it.

        `text` has a placeholder for each image, in order; they precede a text that has none. `starts` adds the special
        tokens that begin a text. Raises InputRefused for an image or a missing placeholder, TooManyTokens for more than
        twice `most`.
        """
        if len(images) > MOST_IMAGES:
            raise InputRefused(f"the prompt has {len(images)} images", hint=f"give at most {MOST_IMAGES}")
        found = text.count(self.marker)
        if found not in (0, len(images)):
            problem = f"placeholders `{self.marker}` in the prompt: {found}; images: {len(images)}"
            raise InputRefused(problem, hint="write one for each image, or none")
        if not found:
            text = self.family.text_of_image(self.marker, self.processor) * len(images) + text
        self.refuse_videos(token_ids(self.processor.tokenizer, text, most, add_special_tokens=False))
        ids = self._prepared(text, images, starts)["input_ids"][0]
        return EncodedPrompt([int(token) for token in ids], lambda: self._embeddings(text, images, starts))

    def refuse_videos(self, ids: Sequence[int], name: str = "the prompt") -> None:
        """Raises InputRefused for a prompt with a placeholder of a video, whose features no graph computes."""
        if getattr(self.family.config, "video_token_id", None) in ids:
            raise InputRefused(f"{name} has a placeholder of a video", hint="give some of its frames as images")

    def without_images(self, ids: list[int], name: str = "the prompt") -> list[int]:
        """The tokens `ids`; raises InputRefused if one is a placeholder of an image or of a video."""
        self.refuse_videos(ids, name)
        if self.token in ids or self.family.start_token in ids:  # which starts an image
            raise InputRefused(
                f"{name} has a placeholder of an image, and no image",
                hint="give `--image PATH`, in JSON the field `image`, in Python `Prompt(images=…)`; for embeddings of "
                "your own, name the token as their `placeholder`",
            )
        return ids

    def _embeddings(self, text: str, images: Sequence[Any], starts: bool) -> PromptEmbeddings:
        prepared = self._prepared(text, images, starts)
        given = {name: _array(value) for name, value in prepared.items() if name not in TEXT_INPUTS}
        where = np.asarray(prepared["input_ids"])[0] == self.token
        try:
            features = self.open_features()(given)
        except KeyError as error:
            raise InputRefused(f"the processor of images makes no {error}", hint=OTHER_MODEL) from error
        rows = features.rows.astype(np.float32)
        if where.sum() != len(rows):
            problem = f"the processor makes {where.sum()} placeholder tokens, and the vision tower {len(rows)} features"
            raise InputRefused(problem, hint=OTHER_MODEL)
        inputs = self.family.inputs(where, features, given)
        return PromptEmbeddings(np.flatnonzero(where), rows, inputs=inputs, read_whole=self.family.read_whole)

    def _prepared(self, text: str, images: Sequence[Any], starts: bool) -> Any:
        opened: list[Any] = []
        for image in images:
            opened.append(open_image(image, most=MOST_PIXELS - sum(one.width * one.height for one in opened)))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return self.processor(
                    text=[text], images=[opened], return_tensors=self.family.tensors, add_special_tokens=starts
                )
        except MemoryError:
            raise
        except Exception as error:  # processors check their inputs by failing
            raise _refused("the model's processor fails on the prompt and its images", error) from error


def _array(value: Any) -> Array:
    """An array of what a processor returns; bfloat16 becomes float32."""
    return np.asarray(value.float() if "bfloat16" in str(getattr(value, "dtype", "")) else value)


def _refused(problem: str, error: Exception) -> InputRefused:
    reason = first_line(error).split(" but it was not found")[0]
    missing = next((name for name in INSTALLED if name in reason.lower()), "")
    message = f"{problem}: {reason}"
    return InputRefused(message, hint=INSTALLED.get(missing, "copy the processor's files of the model again"))


def with_images(messages: Sequence[Any], count: int) -> list[Any]:
    """A chat with parts for images, put before its first text unless it has them; UsageProblem for another number."""
    parts = [part for one in messages if isinstance(one["content"], list | tuple) for part in one["content"]]
    known = sum(isinstance(part, dict) and part.get("type") == "image" for part in parts)
    if known not in (0, count):
        problem = f"the chat has {known} parts of type `image`, and there are {count} images"
        raise UsageProblem(problem, hint="write one for each image")
    texts = [one["content"] for one in messages]
    contents = [[{"type": "text", "text": one}] if isinstance(one, str) else list(one) for one in texts]
    made = [{**one, "content": content} for one, content in zip(messages, contents, strict=True)]
    if not known:
        first = next((at for at, one in enumerate(made) if one["role"] != "system"), 0)
        made[first]["content"] = [{"type": "image"}] * count + made[first]["content"]
    return made


FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # formats by Pillow's names; of an animation the first image counts
LARGEST_FILE, MOST_PIXELS = 32 << 20, 64 << 20  # maximum number of bytes of a file, and of pixels of an image
# maximum ratio of its sides, that of Qwen2-VL's processor: one that resizes the shorter side would fill the memory
MOST_RATIO = 200


def open_image(source: Any, most: int = MOST_PIXELS) -> Any:
    """An image as Pillow has it, upright and in RGB; transparent pixels become white, as in transformers' processors.

    `source` is a path, the bytes of a file, or an image of Pillow, of at most `most` pixels.
    Raises InputRefused for an unreadable or too large image, UsageProblem without Pillow or for another source.
    """
    if isinstance(source, _pillow().Image):
        return _upright(source.copy(), "the image")
    if isinstance(source, str | Path):
        return _decoded(_content(Path(source)), f"`{source}`", most)
    if isinstance(source, bytes):
        return _decoded(source, "the image", most)
    raise UsageProblem(f"an image is {kind_of(source)}", hint="give a path, bytes, or an image of Pillow")


def _pillow() -> Any:
    try:
        return importlib.import_module("PIL.Image")
    except ImportError as error:
        raise UsageProblem("images need the library Pillow", hint="`pip install pillow`") from error


def _content(path: Path) -> bytes:
    try:
        if not path.is_file():
            problem = "is not a file" if path.exists() else "does not exist"
            raise InputRefused(f"the image `{path}` {problem}", hint=f"give the path of one of: {', '.join(FORMATS)}")
        with open(path, "rb") as file:
            return file.read(LARGEST_FILE + 1)
    except (OSError, ValueError) as error:
        raise InputRefused(f"the image `{path}` cannot be read: {first_line(error)}", hint="give a file") from error


def _decoded(content: bytes, name: str, most: int) -> Any:
    if len(content) > LARGEST_FILE:
        raise InputRefused(f"{name} is larger than {LARGEST_FILE >> 20} MB", hint="give a smaller image")
    if not content:
        raise InputRefused(f"{name} is empty", hint="copy it again from where it was saved")
    pillow = _pillow()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Pillow, about sizes that are checked here
            image = pillow.open(io.BytesIO(content), formats=FORMATS)
    except pillow.DecompressionBombError as error:
        problem = f"{name} has too many pixels: the images of a prompt may have {MOST_PIXELS:,} together"
        raise InputRefused(problem, hint="give a smaller image") from error
    except Exception as error:  # its decoders raise anything
        known = ", ".join(FORMATS)
        raise InputRefused(f"{name} is not an image of a known format", hint=f"give one of: {known}") from error
    width, height = image.size
    if width * height > most:
        problem = f"{name} has {width} x {height} pixels: the images of a prompt may have {MOST_PIXELS:,} together"
        raise InputRefused(problem, hint="give a smaller image")
    if max(width, height) > MOST_RATIO * min(width, height):
        message = f"{name} has {width} x {height} pixels: one side may be {MOST_RATIO} times the other"
        raise InputRefused(message, hint="crop it")
    return _upright(image, name)


def _upright(image: Any, name: str) -> Any:
    """The image, rotated as its camera recorded, in RGB."""
    operations = importlib.import_module("PIL.ImageOps")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Pillow, about damaged EXIF, which is then not used
            return _opaque(operations.exif_transpose(image))
    except MemoryError:
        raise
    except Exception as error:  # its decoders raise anything
        problem = f"{name} cannot be decoded: {first_line(error)}"
        raise InputRefused(problem, hint="is the file complete? save it again") from error


def _opaque(image: Any) -> Any:
    """The image in RGB, over white where it is transparent (transformers `image_transforms.convert_to_rgb`)."""
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    image = image.convert("RGBA")
    return _pillow().alpha_composite(_pillow().new("RGBA", image.size, (255, 255, 255)), image).convert("RGB")
