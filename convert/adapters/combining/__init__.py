"""Several adapters in one."""
