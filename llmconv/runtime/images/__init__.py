"""Images of multimodal models: how they reach the vision graph, and their features the prompt, family by family."""
