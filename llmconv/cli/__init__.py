"""The command line: each command is one small file that parses, calls the library and prints."""

from llmconv.cli.command_group import main

__all__ = ["main"]
