"""Megatron-LM, Megatron Core and NeMo: their checkpoints."""
