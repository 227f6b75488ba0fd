"""PatchProcessor: transformers' Gemma4Processor for texts and images, without the parts for videos and sounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer, Gemma4ImageProcessorPil

from llmconv.runtime.tokenizer import require_small_template
from llmconv.tensors import Array

COUNTS = "num_soft_tokens_per_image"


@dataclass(frozen=True)
class PatchProcessor:
    """Expands the placeholder of each image, as in transformers' processing_gemma4.py; `images` makes patches."""

    images: Any
    tokenizer: Any

    @classmethod
    def of(cls, folder: Path) -> PatchProcessor:
        """The processor of the model in a folder."""
        require_small_template(folder)
        options = {"local_files_only": True, "trust_remote_code": False}
        images = Gemma4ImageProcessorPil.from_pretrained(folder, local_files_only=True)
        return cls(images, AutoTokenizer.from_pretrained(folder, **options))

    def __call__(
        self, text: Sequence[str], images: Sequence[Sequence[Any]], return_tensors: str = "np", **options: Any
    ) -> dict[str, Array]:
        """Tokens, patches and their places of one text and its images (of Pillow).

        `return_tensors` is `np`; `options` are passed to the tokenizer. Raises ValueError unless the text has a
        placeholder for each image.
        """
        given = dict(self.images(list(images[0]), return_tensors="np"))
        counts, token = given.pop(COUNTS), self.tokenizer.image_token
        first, *others = text[0].split(token)
        if len(others) != len(counts):
            raise ValueError(f"{len(others)} placeholders and {len(counts)} images")
        start, end = self.tokenizer.boi_token, self.tokenizer.eoi_token
        parts = [f"{start}{token * int(count)}{end}{part}" for count, part in zip(counts, others, strict=True)]
        ids = self.tokenizer(first + "".join(parts), **options)["input_ids"]
        return {"input_ids": np.array([ids], dtype=np.int64), **given}
