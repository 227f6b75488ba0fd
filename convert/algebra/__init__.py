"""The algebra of lazy tensors: rename, split, concatenate, permute, transpose; nothing is read."""
