"""Writes reports: JSON, JUnit, Markdown, HTML with plots, annotations for GitHub, progress lines."""
