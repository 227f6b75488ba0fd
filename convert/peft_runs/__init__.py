"""Training checkpoints that hold a whole PeftModel: the base with an adapter in it, whatever program saved them."""
