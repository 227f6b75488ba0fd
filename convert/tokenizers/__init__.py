"""Tokenizer files: found, restored, and written as tokenizer.json."""
