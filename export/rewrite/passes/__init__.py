"""Changes to a whole decoder graph, one per file; each takes a named and bound model and edits it in place."""
