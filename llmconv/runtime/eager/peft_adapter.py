"""with_adapter: the eager model with a PEFT adapter around its layers, not merged."""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path
from typing import Any

from llmconv.errors import InputRefused, UsageProblem, first_line


def with_adapter(model: Any, adapter: Path) -> Any:
    """The model with a PEFT adapter around its layers."""
    try:
        peft = importlib.import_module("peft")
    except ImportError as error:
        raise UsageProblem(
            "an adapter that is not merged needs the library peft",
            hint="`pip install peft`, or merge it: `llmconv merge-lora BASE ADAPTER -o OUT`",
        ) from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft's own use of transformers
            tuned = peft.PeftModel.from_pretrained(model, adapter).eval()
    except Exception as error:  # each kind of adapter raises its own exceptions
        raise InputRefused(
            f"PEFT cannot apply `{adapter}` to the model: {first_line(error)}", hint="is it an adapter of this model?"
        ) from error
    if tuned.active_peft_config.is_prompt_learning:
        raise InputRefused(
            f"`{adapter}` is a tuned prefix, which belongs to no layer", hint="give it with `--prefix-tuning`"
        )
    return tuned


def without_adapter(model: Any) -> Any:
    """transformers' own model inside of a model with an adapter; any other as it is."""
    return getattr(model, "get_base_model", lambda: model)()
