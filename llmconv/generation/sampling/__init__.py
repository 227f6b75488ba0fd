"""Sampling: generation settings, logits processors, and the choice of the next token."""
