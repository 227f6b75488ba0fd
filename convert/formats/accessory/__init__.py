"""LLaMA2-Accessory: its checkpoints, adapters and deltas."""
