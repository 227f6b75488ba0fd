"""Files of `torch.save`: read as data, and written as streams."""
