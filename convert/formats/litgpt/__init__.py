"""LitGPT: its checkpoints and adapters."""
