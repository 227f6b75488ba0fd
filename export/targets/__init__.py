"""Providers of onnxruntime that graphs are made for: options that suit them, and the kernels that they have."""
