"""Comparison: the scenarios run on graphs, and their outputs measured against the reference."""
