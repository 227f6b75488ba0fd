"""DeepSpeed: ZeRO checkpoints of stages 0 to 3, and universal checkpoints."""
