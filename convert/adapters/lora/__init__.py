"""What PEFT's LoRA can say: its config, its variants, and where its factors belong."""
