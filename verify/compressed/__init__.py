"""Folders of `llmconv quantize`: every code and scale against the model."""
