"""The reference: the eager model in float64, with the rounding noise of the graph's dtype."""
