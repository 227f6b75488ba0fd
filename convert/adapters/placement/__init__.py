"""Which tensor of the base each tensor of an adapter belongs to, and what it changes there."""
