"""`verify --client`: generates with the programs that run the graphs, and compares their tokens with the model's."""
