"""Graphs of other exporters in float16 and bfloat16."""
