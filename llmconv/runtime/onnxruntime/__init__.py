"""Running graphs with onnxruntime: what a graph may refer to, sessions, caches, memory."""
