"""The report as files: JSON, JUnit, Markdown, HTML with plots, annotations of GitHub."""
