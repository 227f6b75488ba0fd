"""The vision tower and projector of multimodal models as a graph, `vision.onnx`."""
