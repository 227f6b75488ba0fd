"""Sampling: the settings of `GenerationConfig`, logits processors, and the choice of the next token."""
