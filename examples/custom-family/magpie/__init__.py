"""The code that travels with a Magpie checkpoint."""
