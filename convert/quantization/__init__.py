"""Quantized bases: what a merge makes of them, and how much of it is kept."""
