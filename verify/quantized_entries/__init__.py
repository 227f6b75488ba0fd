"""Quantized graphs that only llmconv's own runner runs: static, in stages, with a prefix, of tokens, of embeddings."""
