"""DeepSpeed: ZeRO checkpoints of stages 1 to 3, and universal checkpoints."""
