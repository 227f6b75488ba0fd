"""The results of generate: completions, the settings that were in force, and what they cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from llmconv.generation.cost import GenerationCost

TOO_LONG = "too_long"
"""`finish` of a prompt that leaves no room for new tokens, or is longer than the context."""


@dataclass(frozen=True)
class Completion:
    """A continuation of a prompt.

    Attributes:
        prompt: as given, a text or a chat.
        text: the new text, without the prompt.
        tokens: the new tokens, without the end token.
        prompt_tokens: number of tokens of the prompt that were used.
        finish: why it ended: `eos`, `length` or `stop`; or `too_long`: the prompt was left out.
        sequence: which continuation of this prompt, from 0.
        cut_tokens: number of tokens that `src_length` cut from the prompt.
        seconds: from the start of its batch to the last token.
    """

    prompt: Any
    text: str
    tokens: list[int]
    prompt_tokens: int
    finish: str
    sequence: int = 0
    cut_tokens: int = 0
    seconds: float = field(default=0.0, compare=False)

    def __repr__(self) -> str:
        return f"<Completion {shortened(self.text)!r}: {len(self.tokens)} tokens, {self.finish}>"


@dataclass(frozen=True)
class Generation:
    """All completions, in the order of the prompts, and their cost.

    Attributes:
        completions: `num_return_sequences` per prompt; empty if they are in `output_file`.
        backend: `onnx`, `torch` or `genai`.
        batches: cost of each batch, in the order in which they ran.
        encode_seconds: time in which all prompts became tokens.
        settings: what was in force, by the names of the options.
        too_long: number of prompts that were left out.
        output_file: the file with the completions, if there is one.
        kept: number of completions that the file had before.
    """

    completions: list[Completion]
    backend: str
    batches: list[GenerationCost]
    encode_seconds: float = 0.0
    settings: Mapping[str, Any] = field(default_factory=dict)
    too_long: int = 0
    output_file: Path | None = None
    kept: int = 0

    def __repr__(self) -> str:
        tokens = sum(len(one.tokens) for one in self.completions)
        first = f", first {shortened(self.completions[0].text)!r}" if self.completions else ""
        return f"<Generation: {len(self.completions)} completion(s), {tokens} tokens, {self.backend}{first}>"

    @property
    def total(self) -> GenerationCost:
        """The total of all batches."""
        return GenerationCost.sum(self.batches)

    def as_dict(self) -> dict[str, Any]:
        """For JSON, times rounded."""
        made: dict[str, Any] = {
            "completions": [{**asdict(one), "seconds": round(one.seconds, 4)} for one in self.completions]
        }
        if self.output_file:
            made = {"output_file": str(self.output_file), "kept": self.kept}
        costs, total = [cost.as_dict() for cost in self.batches], self.total.as_dict()
        if costs:
            total["time_to_first_token"] = costs[0]["time_to_first_token"]
        spent = {"too_long": self.too_long, "encode_seconds": round(self.encode_seconds, 4)}
        return {
            "backend": self.backend,
            "settings": dict(self.settings),
            **made,
            "batches": costs,
            **total,
            **spent,
        }

    def summary(self) -> list[str]:
        """Lines for a person: what the file had before, tokens and memory, and where the time went."""
        lines = [f"{self.kept} of the texts were finished before"] if self.kept else []
        if not self.batches:
            return lines
        return [*lines, self.total.summary(len(self.batches)), self.total.times(self.encode_seconds)]


def shortened(text: str, length: int = 60) -> str:
    """The first `length` characters of a text, with an ellipsis if there are more."""
    return text if len(text) <= length else text[: length - 1] + "…"
