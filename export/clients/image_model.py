"""ImageModel: what clients read of a model that takes images, besides its decoder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from llmconv.checkpoint import Checkpoint
from llmconv.output.plan import json_bytes

CONFIG, PROCESSOR, PREPROCESSOR = "config.json", "processor_config.json", "preprocessor_config.json"

Edits = Mapping[str, Mapping[str, Any]]
"""Fields that a client needs in JSON files of the model, by file name."""


@dataclass(frozen=True)
class ImageModel:
    """A multimodal model whose vision tower is a graph: its transformers config and the content of its JSON files.

    `processor` is empty if `processor_config.json` is missing.
    """

    config: Any
    fields: Mapping[str, Any] = field(default_factory=dict)
    processor: Mapping[str, Any] = field(default_factory=dict)
    has_preprocessor: bool = True

    @classmethod
    def of(cls, config: Any, checkpoint: Checkpoint) -> ImageModel:
        """The model of a checkpoint with `config.json` and the processor's files."""
        files = checkpoint.side_files
        return cls(config, checkpoint.config, _content(files.get(PROCESSOR)), PREPROCESSOR in files)

    @property
    def model_type(self) -> str:
        """Its `model_type`."""
        return str(self.config.model_type)

    @property
    def token(self) -> int:
        """The placeholder token whose embeddings the features of images replace."""
        return int(self.config.image_token_id)


def edited(checkpoint: Checkpoint, edits: Edits) -> Checkpoint:
    """The checkpoint with other fields in its JSON files; edits of files that it lacks are left out."""
    side_files = {
        name: json_bytes({**_content(content), **edits[name]}) if name in edits else content
        for name, content in checkpoint.side_files.items()
    }
    return replace(checkpoint, config={**checkpoint.config, **edits.get(CONFIG, {})}, side_files=side_files)


def _content(text: bytes | None) -> dict[str, Any]:
    """The object in a JSON file; empty for another file."""
    try:
        found = json.loads(text or b"{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
