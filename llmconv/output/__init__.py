"""Writing a checkpoint: the plan, the shards, the staged folder, the stream of bytes, the manifest."""
