"""Graphs with quantized weights: how they store matrices, their rounding errors, and the loss of accuracy."""
