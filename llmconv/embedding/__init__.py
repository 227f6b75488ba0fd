"""Runs graphs without a cache on texts: embeddings, logits of classes, scores of a reranker."""

from llmconv.embedding.embed import Embedded, embed
from llmconv.embedding.embedder import Embedder, TextFeatures

__all__ = ["Embedded", "Embedder", "TextFeatures", "embed"]
