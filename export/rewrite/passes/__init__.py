"""Changes of a whole decoder graph, one per file; each edits a named and bound model in place."""
