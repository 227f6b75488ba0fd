"""Quantized checkpoints: their weights as plain values, as stored codes, and stored again after a change."""
