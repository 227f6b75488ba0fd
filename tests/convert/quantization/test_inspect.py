"""inspect of quantized models: the parameters of the model, not the numbers that they are packed in."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from llmconv.convert.inspection import inspect
from tests.builders.quantized_models import BASES, FOLDER, stored


def parameters_of(folder: Path) -> int:
    """Of the plain model that the config describes."""
    config = {**json.loads((folder / "config.json").read_text())}
    del config["quantization_config"]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    return int(model.num_parameters())


@pytest.mark.parametrize("name", BASES)
def test_parameters_are_those_of_the_plain_model(name: str) -> None:
    found = inspect(FOLDER / name)
    assert found.parameters == parameters_of(FOLDER / name) and not found.warnings
    assert found.nbytes == sum(tensor.nbytes for tensor in stored(FOLDER / name).values())


def test_an_unknown_method_is_told_and_its_numbers_are_counted_as_they_are(changed: Callable[..., Path]) -> None:
    found = inspect(changed("gptq_4bit_sym", quant_method="aqlm"))
    assert found.parameters == sum(tensor.numel() for tensor in stored(FOLDER / "gptq_4bit_sym").values())
    (warning,) = found.warnings
    assert warning.startswith("parameters are counted as they are packed: ") and "`aqlm`" in warning
