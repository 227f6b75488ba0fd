"""The Hugging Face Hub: addresses of models, and repositories that are written: files sent first, then one commit."""
