"""One file for each program whose adapters are not PEFT's."""
