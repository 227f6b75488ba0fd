"""Graphs that other exporters made, against the eager model: `llmconv verify --graph FILE --reference HF_FOLDER`."""
