"""What the format meta is made of: params.json and its tokenizers."""
