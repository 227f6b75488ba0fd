"""Images of a prompt, decoded within limits: a file of any other kind, or a decompression bomb, is refused."""

from __future__ import annotations

import importlib
import io
import warnings
from pathlib import Path
from typing import Any

from llmconv.errors import InputRefused, UsageProblem, first_line
from llmconv.files.paths import kind_of

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Formats by Pillow's names; of an animation the first image counts."""

LARGEST_FILE, MOST_PIXELS = 32 << 20, 64 << 20
"""Maximum number of bytes of a file, and of pixels of an image."""

MOST_RATIO = 200
"""Maximum ratio of its sides, that of Qwen2-VL's processor: one that resizes the shorter side would fill the memory."""


def open_image(source: Any, name: str = "", most: int = MOST_PIXELS) -> Any:
    """An image as Pillow has it, upright and in RGB; what is transparent is over white, as transformers' processors do.

    Args:
        source: a path, the bytes of a file, or an image of Pillow.
        name: of the image in messages (default: its path).
        most: maximum number of pixels.

    Raises:
        InputRefused: the file cannot be read, is not an image, or is too large.
        UsageProblem: `source` is something else, or Pillow is not installed.
    """
    pillow = _pillow()
    if isinstance(source, pillow.Image):
        return _upright(source.copy(), name or "the image")
    if isinstance(source, str | Path):
        return _decoded(_content(Path(source)), name or f"`{source}`", most)
    if isinstance(source, bytes):
        return _decoded(source, name or "the image", most)
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
        raise InputRefused(
            f"{name} has too many pixels: the images of a prompt may have {MOST_PIXELS:,} together",
            hint="give a smaller image",
        ) from error
    except Exception as error:  # its decoders raise anything
        known = ", ".join(FORMATS)
        raise InputRefused(f"{name} is not an image of a known format", hint=f"give one of: {known}") from error
    width, height = image.size
    if width * height > most:
        raise InputRefused(
            f"{name} has {width} x {height} pixels: the images of a prompt may have {MOST_PIXELS:,} together",
            hint="give a smaller image",
        )
    if max(width, height) > MOST_RATIO * min(width, height):
        raise InputRefused(
            f"{name} has {width} x {height} pixels: one side may be {MOST_RATIO} times the other", hint="crop it"
        )
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
        raise InputRefused(
            f"{name} cannot be decoded: {first_line(error)}", hint="is the file complete? save it again"
        ) from error


def _opaque(image: Any) -> Any:
    """The image in RGB, over white where it is transparent (transformers `image_transforms.convert_to_rgb`)."""
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    image = image.convert("RGBA")
    return _pillow().alpha_composite(_pillow().new("RGBA", image.size, (255, 255, 255)), image).convert("RGB")
