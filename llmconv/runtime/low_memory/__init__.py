"""Running models and graphs that do not fit in memory, a layer at a time."""
