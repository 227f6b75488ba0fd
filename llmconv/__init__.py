"""llmconv: training checkpoint -> Hugging Face folder -> merged adapter -> verified ONNX graphs."""

__version__ = "0.1.0"
