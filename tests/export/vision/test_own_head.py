"""Whether the head of a model with images is its embedding, by any part of its config, as in transformers."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from llmconv.checkpoint import open_checkpoint
from llmconv.export.language_model import open_language_model
from tests.builders.tiled import save_tiled

TIE = "tie_word_embeddings"


def is_tied(folder: Path) -> bool:
    """Whether transformers has one matrix for both."""
    model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    return bool(model.get_output_embeddings().weight.data_ptr() == model.get_input_embeddings().weight.data_ptr())


@pytest.mark.slow
def test_a_stored_head_is_tied_only_where_transformers_ties_it(tmp_path: Path) -> None:
    save_tiled("mistral3", tmp_path)
    file = tmp_path / "model.safetensors"
    config, tensors = json.loads((tmp_path / "config.json").read_text()), load_file(file)
    embedding = next(tensor for name, tensor in tensors.items() if name.endswith("embed_tokens.weight"))
    body = {name: tensor for name, tensor in tensors.items() if not name.endswith("lm_head.weight")}
    odd: list[object] = []
    for top, inner in product((None, True, False), (None, False)):
        for part, value in ((config, top), (config["text_config"], inner)):
            part.pop(TIE, None)
            part |= {} if value is None else {TIE: value}
        (tmp_path / "config.json").write_text(json.dumps(config))
        save_file({**body, "language_model.lm_head.weight": embedding + 1}, file, metadata={"format": "pt"})
        stored = open_language_model(open_checkpoint(tmp_path)).config.tie_word_embeddings
        if stored != is_tied(tmp_path) and not (top is True and inner is None):  # export refuses that one by name
            odd.append((top, inner, stored))
    assert odd == []
