"""Where the graphs of an export go: the model folder, a new one, one without weights; and models in memory."""
