"""TorchOptions: options of the eager model, which graphs do not take."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmconv.errors import UsageProblem
from llmconv.files.paths import kind_of

DTYPES = ("float32", "float16", "bfloat16")
"""Dtypes of the eager model."""


@dataclass(frozen=True)
class TorchOptions:
    """Options of the eager model: an adapter for PEFT or `merge-lora`, torch's name of the device, one of `DTYPES`.

    None means no adapter, the CPU, and the dtype of the weights.
    """

    adapter: str | Path | None = None
    device: str | None = None
    dtype: str | None = None

    @classmethod
    def of(cls, adapter: str | Path | None, device: Any, dtype: Any) -> TorchOptions:
        """The options from values that transformers' pipeline accepts, too; raises UsageProblem for others.

        A device is a name, torch's object, or the number of a GPU, -1 for the CPU; a dtype is a name, torch's object,
        or `auto` for that of the weights.
        """
        if isinstance(device, int) and not isinstance(device, bool):
            device = "cpu" if device < 0 else f"cuda:{device}"
        for name, value in (("device", device), ("dtype", dtype)):
            is_torch = type(value).__module__ == "torch"
            if value is not None and not isinstance(value, str) and not is_torch:
                raise UsageProblem(f"`{name}` is {kind_of(value)}", hint=f"give the name of a {name}")
        dtype = None if dtype in (None, "auto") else str(dtype).removeprefix("torch.")
        return cls(adapter, None if device is None else str(device), dtype)

    def require_dtype(self) -> None:
        """Raises UsageProblem unless `dtype` is one of `DTYPES`."""
        if self.dtype not in (None, *DTYPES):
            raise UsageProblem(f"unknown dtype `{self.dtype}`", hint=f"give one of: {', '.join(DTYPES)}")

    def refuse(self) -> None:
        """Raises UsageProblem if any option is given, for graphs."""
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
