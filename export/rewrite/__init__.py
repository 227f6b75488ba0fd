"""Rewriting traced graphs: layers replicated, linear layers as Gemm, names, passes, operators of one runtime."""
