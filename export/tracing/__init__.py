"""Tracing: a few layers of the eager model on fake weights become an ONNX graph."""
