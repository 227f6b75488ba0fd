"""GGUF files of llama.cpp."""
