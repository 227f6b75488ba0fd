"""The layers of a graph: cut out of the file, compared with each other, and run one at a time."""
