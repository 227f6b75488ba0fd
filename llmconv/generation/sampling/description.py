"""GenerationSettings for reports: as fields for JSON, and as a line for a person."""

from __future__ import annotations

import reprlib
from dataclasses import asdict
from typing import Any

from llmconv.generation.sampling.settings import GenerationSettings

SHORT = reprlib.Repr()
"""Values on a line: of a list that a model folder brings, only the beginning."""
SHORT.maxlist = SHORT.maxdict = 8
SHORT.maxstring = SHORT.maxother = 60


def settings_fields(settings: GenerationSettings) -> dict[str, Any]:
    """All settings by name, sets as sorted lists, and with the other fields of `GenerationConfig` that are set."""
    fields = {name: value for name, value in asdict(settings).items() if name not in ("extra", "explicit")}
    ends = sorted(settings.eos_token_id)
    return {**fields, "eos_token_id": ends, "stop_strings": list(settings.stop_strings), **settings.extra}


def settings_line(settings: GenerationSettings) -> str:
    """The settings that decide about the text, on one line."""
    parts = ["greedy" if settings.num_beams == 1 else "beam search"]
    if not settings.is_greedy:
        names = ("temperature", "top_k", "top_p", "min_p", "seed")
        given = {name: getattr(settings, name) for name in names}
        parts = ["sampling", *(f"{name} {value}" for name, value in given.items() if value is not None)]
    if settings.num_beams > 1:
        parts.append(f"num_beams {settings.num_beams}")
    if settings.repetition_penalty != 1:
        parts.append(f"repetition_penalty {settings.repetition_penalty}")
    length = "max_length" if settings.max_new_tokens is None else "max_new_tokens"
    parts.append(f"{length} {getattr(settings, length)}")
    parts += [f"{name} {SHORT.repr(value)}" for name, value in sorted(settings.extra.items())]
    if settings.stop_strings:
        parts.append(f"stop {SHORT.repr(list(settings.stop_strings))}")
    return f"settings: {', '.join(parts)}"
