"""Running the eager model with torch and transformers."""
