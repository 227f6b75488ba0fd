"""Torch Distributed Checkpoint (DCP): a folder of shards, read lazily and without torch."""
