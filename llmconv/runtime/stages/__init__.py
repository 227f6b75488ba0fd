"""Stages of a model in several processes: what serves a stage, what runs a model over stages, and their protocol."""
