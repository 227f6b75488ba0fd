"""TorchOptions: options of the eager model, which graphs do not take."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from llmconv.errors import UsageProblem

DTYPES = ("float32", "float16", "bfloat16")
"""Dtypes of the eager model."""


@dataclass(frozen=True)
class TorchOptions:
    """Options of the eager model.

    Attributes:
        adapter: an adapter of PEFT, or of another program that `merge-lora` reads.
        device: torch's name of the device; None for the CPU.
        dtype: one of `DTYPES`; None for that of the weights.
    """

    adapter: str | Path | None = None
    device: str | None = None
    dtype: str | None = None

    def require_dtype(self) -> None:
        """Refuses other dtypes.

        Raises:
            UsageProblem: `dtype` is not one of `DTYPES`.
        """
        if self.dtype not in (None, *DTYPES):
            raise UsageProblem(f"unknown dtype `{self.dtype}`", hint=f"give one of: {', '.join(DTYPES)}")

    def refuse(self) -> None:
        """Refuses the options, for graphs.

        Raises:
            UsageProblem: one of them is given.
        """
        for name, (refusal, hint) in REFUSALS.items():
            if getattr(self, name) is not None:
                raise UsageProblem(refusal, hint=hint)


REFUSALS = {
    "adapter": (
        "GenAI and stages in other processes take no adapter",
        "leave out `--backend genai` or `--stage-at`; or merge it: `llmconv merge-lora BASE ADAPTER -o OUT`",
    ),
    "device": (
        "`device` is for `--backend torch`",
        'for graphs give `--provider cuda`, in Python `SessionSettings(provider="cuda")`',
    ),
    "dtype": ("`dtype` is for `--backend torch`", "graphs compute in the type of `llmconv export --precision`"),
}
"""Message and hint by option, for graphs."""
