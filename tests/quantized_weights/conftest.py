"""Copies of genuine quantized models with some of their tensors changed."""

from __future__ import annotations

from tests.builders.quantized_models import changed as changed
