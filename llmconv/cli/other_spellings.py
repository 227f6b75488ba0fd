"""Options that another command has, or another program: what to give in their place."""

from __future__ import annotations

EMBED_TEXTS = "texts are arguments: `llmconv embed FOLDER TEXT…`, or lines of `--text-file FILE`"

HINTS: dict[tuple[str, str], str] = {
    **{("embed", option): EMBED_TEXTS for option in ("--prompt", "--text", "--texts", "--input")},
    ("embed", "--prompt-file"): "`--text-file FILE` reads one text per line",
    ("embed", "-o"): "`--output-file FILE` writes a .npy array, or JSON lines",
    ("embed", "--output"): "`--output-file FILE` writes a .npy array, or JSON lines",
    ("generate", "--text"): "`--prompt TEXT`",
    ("generate", "--text-file"): "`--prompt-file FILE`",
    ("generate", "--images"): "`--image FILE`, once per image",
    ("generate", "-o"): "`--output-file FILE` writes JSON lines",
    ("generate", "--output"): "`--output-file FILE` writes JSON lines",
}
"""Command and option to the hint."""


def hint_for(command: str, option: str) -> str:
    """The hint for an option that a command does not have; empty if there is none but the help.

    Args:
        command: its name, such as `embed`.
        option: as it was given, such as `--prompt`.
    """
    return HINTS.get((command, option), "")
