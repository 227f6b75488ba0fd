"""Measured figures and their targets; `make bench` runs them."""
