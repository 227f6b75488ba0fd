"""MindFormers and MindSpore: `.ckpt` and safetensors files, rank folders with their strategy, adapters."""
