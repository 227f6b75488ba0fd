"""Running graphs with onnxruntime: checks of hostile graphs, sessions, caches, memory."""
