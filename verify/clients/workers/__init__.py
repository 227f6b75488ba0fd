"""Programs that run in the environments of the clients: they import neither llmconv nor each other."""
