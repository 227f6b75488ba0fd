"""Pickles as data: read by a machine that knows no code, and written in the few opcodes that tensors need."""
