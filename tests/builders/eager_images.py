"""What transformers itself generates from texts and images."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def eager_tokens(folder: Path, text: str, pictures: Sequence[Path], count: int) -> list[int]:
    """New tokens of transformers' model on its own processor's inputs.

    Args:
        folder: of the model and its processor.
        text: with a marker for each image.
        pictures: files of images; may be empty.
        count: number of new tokens.
    """
    import transformers  # noqa: PLC0415 - only the tests that ask for a model pay for it
    from PIL import Image  # noqa: PLC0415

    processor = transformers.AutoProcessor.from_pretrained(folder)
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder).eval()
    images = {"images": [[Image.open(path) for path in pictures]]} if pictures else {}
    given = processor(text=[text], **images, return_tensors="pt")
    found = model.generate(**given, max_new_tokens=count, do_sample=False, eos_token_id=None)
    return [int(token) for token in found[0, given["input_ids"].shape[1] :]]
