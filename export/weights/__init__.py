"""The weights of a graph: the stored tensors of each parameter, mapped in their files."""
