"""MLX: the LoRA adapters that mlx-lm writes. Its models are Hugging Face folders already."""
