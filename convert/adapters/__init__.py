"""Adapters: their files, the weights that they change, and the sum W + s·B·A."""
