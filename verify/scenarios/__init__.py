"""Scenarios: the calls that are run on the graphs and on the eager model."""
