"""Quantized bases: opened as plain weights, and stored again after a merge."""
