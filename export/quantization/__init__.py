"""Quantized weights of graphs: blocks of integer codes with a scale each, and the operators that read them."""
