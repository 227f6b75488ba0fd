"""Results: how an error is measured, the checks made of it, and the report that collects them."""
