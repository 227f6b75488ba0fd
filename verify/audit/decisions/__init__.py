"""The decisions of a graph: what it chooses by lengths, batch size, positions or token ids, and by which numbers."""
