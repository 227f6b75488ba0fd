"""Verifies graphs without a cache: embeddings, classes, scores and logits of whole texts."""
