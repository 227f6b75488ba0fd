"""Deltas: what turns a base into the model that was tuned from it; exact ones, arithmetic ones, and low-rank ones."""

DELTA_FILE = "delta.json"
"""What the folder of an exact delta is told by."""
