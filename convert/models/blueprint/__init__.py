"""What a model consists of: names and shapes, from the constructors of the installed transformers, without torch."""
