"""LitGPT: its configuration, and its names as those of Hugging Face models."""
