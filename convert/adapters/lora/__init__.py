"""LoRA as PEFT stores it: config, variants, and the layout of factors."""
