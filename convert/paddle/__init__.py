"""What the format paddle is made of: pickles of arrays, ranks, families of models."""
