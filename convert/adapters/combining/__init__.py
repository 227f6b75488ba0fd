"""Methods to combine several adapters: linear, SVD, pruning, TIES, DARE."""
