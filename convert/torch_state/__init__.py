"""Torch files that hold one state dict and little else: what is in them, whose names they have, where a prefix ends."""
