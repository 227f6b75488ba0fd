"""Composer and LLM Foundry: runs as one file, as a folder of symlinks or in shards, with or without an adapter."""
