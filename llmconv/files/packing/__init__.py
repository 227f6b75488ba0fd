"""Packed checkpoints: compressed files and tar archives, unpacked once to a temporary file."""
