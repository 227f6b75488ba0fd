"""Graphs with quantised weights: what they store in place of the model's matrices, and what that costs."""
