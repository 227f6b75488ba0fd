"""MindSpore's file formats: `.ckpt`, and the strategy by which ranks divide tensors."""
