"""One file for each of PEFT's tuners other than LoRA."""
