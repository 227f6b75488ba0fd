"""The weights of a graph: which stored tensors each parameter is made of, mapped where they lie."""
