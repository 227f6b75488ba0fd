"""Opening what a user names, a checkpoint, an adapter or either side of a delta; or explaining what it is instead."""
