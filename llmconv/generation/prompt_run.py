"""PromptRun: many prompts in batches, collected or appended to a file, with what each batch cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from llmconv.generation.completion_file import CompletionFile
from llmconv.generation.completions import Completion, GenerationCost
from llmconv.generation.generate import OnPiece, Wording, run_batches
from llmconv.generation.model import TextModel
from llmconv.generation.prompts import Prompt
from llmconv.generation.sampling.settings import GenerationSettings
from llmconv.progress import say

MODEL_FILES = ("*.onnx", "*.safetensors", "tokenizer.json")
"""Files whose size and time show whether a model is still the one that an output file was begun with."""


@dataclass
class PromptRun:
    """One call of `llmconv generate`: its prompts, and their completions and costs so far.

    Attributes:
        model: continues the prompts.
        prompts: all of them, in order.
        settings: how tokens are picked.
        wording: how prompts become texts.
        batch_size: prompts per batch.
        completions: of the prompts, if they are not written to a file.
        costs: of the batches so far.
        skipped: number of prompts that the file had before.
        output: the file; None where completions are collected.
    """

    model: TextModel
    prompts: Sequence[Prompt]
    settings: GenerationSettings
    wording: Wording
    batch_size: int
    completions: list[Completion] = field(default_factory=list)
    costs: list[GenerationCost] = field(default_factory=list)
    skipped: int = 0
    output: Path | None = None

    def collect(self, on_piece: OnPiece | None = None) -> None:
        """Runs all prompts and keeps their completions."""
        self._run(self.completions.extend, on_piece)

    def to_file(self, path: Path, tuned: Mapping[str, str], overwrite: bool, on_piece: OnPiece | None = None) -> None:
        """Runs the prompts that the file does not have yet.

        Args:
            path: the file, see `CompletionFile`.
            tuned: paths of `adapter` and `prefix_tuning`, or empty; the file is only continued with the same ones.
            overwrite: begin the file again.
            on_piece: called with every piece of text.
        """
        folder = self.model.folder.resolve()
        files = sorted(path for kind in MODEL_FILES for path in folder.glob(kind))
        state = {path.name: (path.stat().st_size, path.stat().st_mtime_ns) for path in files}
        model = {"model": str(folder), "files": state, "backend": self.model.backend, **tuned}
        made_with = {**asdict(self.settings), **asdict(self.wording), **model}
        self.output = path
        with CompletionFile(path, self.prompts, made_with, overwrite=overwrite) as file:
            self.skipped = file.done
            self._run(file.write, on_piece)

    def _run(self, take: Callable[[list[Completion]], object], on_piece: OnPiece | None) -> None:
        for completions, cost in run_batches(
            self.model,
            self.prompts,
            self.settings,
            wording=self.wording,
            batch_size=self.batch_size,
            skip=self.skipped,
            on_piece=on_piece,
        ):
            take(completions)
            self.costs.append(cost)
            if len(self.prompts) > self.batch_size:
                say(f"batch {len(self.costs)}: {cost.summary()}")

    def as_dict(self) -> dict[str, Any]:
        """The run for JSON."""
        made: dict[str, Any] = {"completions": [asdict(completion) for completion in self.completions]}
        if self.output:
            made = {"output_file": str(self.output), "kept": self.skipped}
        costs, total = [cost.as_dict() for cost in self.costs], GenerationCost.sum(self.costs).as_dict()
        if costs:
            total["time_to_first_token"] = costs[0]["time_to_first_token"]
        return {"backend": self.model.backend, **made, "batches": costs, **total}

    def summary(self) -> list[str]:
        """Lines for a person: prompts that were finished before, and the total cost."""
        lines = [f"{self.skipped} of {len(self.prompts)} prompts were finished before"] if self.skipped else []
        return lines + ([GenerationCost.sum(self.costs).summary(len(self.costs))] if self.costs else [])
