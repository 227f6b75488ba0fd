"""What a Hugging Face model is: its `config.json`, its class, the tensors it must contain."""
