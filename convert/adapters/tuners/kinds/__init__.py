"""One file for each of PEFT's tuners beside LoRA."""
