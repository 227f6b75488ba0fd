"""The version of llmconv, below every other module."""

__version__ = "0.1.0"
