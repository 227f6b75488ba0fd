"""What the format mindformers is made of: MindSpore files, strategies, families of models."""
