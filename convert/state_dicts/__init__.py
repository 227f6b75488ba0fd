"""State dicts as training leaves them: files and folders, prefixes of wrappers, what lies next to the weights."""
