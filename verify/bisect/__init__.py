"""Bisection: the first node that differs from the eager model, and the smallest piece that shows it."""
