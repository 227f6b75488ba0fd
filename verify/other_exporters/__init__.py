"""Graphs of other exporters, compared with the eager model: `llmconv verify --graph FILE --reference HF_FOLDER`."""
