"""Checkpoints that were packed: compressed, or in a tar archive; unpacked once, to a temporary file."""
