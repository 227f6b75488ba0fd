"""torchtune: its checkpoints, and the adapters that its LoRA recipes write."""
