"""What the conversion tests share: genuine checkpoints, and a judge that loads a folder with transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

FIXTURES = Path(__file__).parents[1] / "fixtures"


@pytest.fixture(scope="session")
def composer() -> Path:
    """The folder of genuine Composer checkpoints."""
    return FIXTURES / "composer"


@pytest.fixture(scope="session")
def meta() -> Path:
    """The folder of genuine Meta checkpoints."""
    return FIXTURES / "meta"


@pytest.fixture
def logits_of() -> Callable[..., Any]:
    """`logits_of(folder, ids, mask)`: float32 logits of the model as transformers loads it, no weight missing."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()

    def run(folder: Path, ids: Any, mask: Any = None) -> Any:
        model, loading = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
        assert not any(loading.values()), loading
        inputs = {} if mask is None else {"attention_mask": torch.from_numpy(np.asarray(mask))}
        with torch.no_grad():
            return model.eval()(torch.from_numpy(np.asarray(ids)), **inputs).logits.numpy()

    return run
