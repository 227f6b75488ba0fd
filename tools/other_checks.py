"""The checks of other tools, applied to the same graph and the same eager model.

Each is what the tool does by default: its inputs, its outputs, its tolerance. Sources: optimum-onnx
`validate_model_outputs`; torch `torch.onnx.testing.assert_onnx_program`; Polygraphy `run --trt --onnxrt` with the
comparator `simple`; llm-foundry `convert_hf_to_onnx.py --verify_export`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from llmconv.errors import LlmconvError
from llmconv.runtime import OrtGraph, Runner, default_positions
from llmconv.runtime.eager.runner import EagerRunner
from llmconv.runtime.onnxruntime.runner import OrtRunner
from llmconv.runtime.runner import ArrayCache
from llmconv.tensors import Array

Outputs = dict[str, Array]
Close = Callable[[Array, Array], bool]


@dataclass(frozen=True)
class Rule:
    """One tool's check.

    Attributes:
        name: of the tool, and its tolerance.
        calls: (sequences, tokens in a random cache, new tokens) of what it runs.
        tokens: ids are below this number; None for the vocabulary.
        logits_only: caches are not compared.
        close: whether an output (first the eager model's) passes.
    """

    name: str
    calls: tuple[tuple[int, int, int], ...]
    close: Close
    tokens: int | None = None
    logits_only: bool = False

    def passes(self, graph: Path, model: EagerRunner) -> bool:
        """Whether a graph passes; one that does not run fails."""
        try:
            opened = OrtGraph(graph)
            runner = OrtRunner(opened, opened)
            return all(self._equal(runner, model, call) for call in self.calls)
        except LlmconvError:
            return False

    def _equal(self, runner: Runner, model: EagerRunner, call: tuple[int, int, int]) -> bool:
        wanted, found = (_run(one, model, *call, self.tokens or model.vocab_size) for one in (model, runner))
        names = ["logits"] if self.logits_only else list(wanted)
        return all(wanted[name].shape == found[name].shape and self.close(wanted[name], found[name]) for name in names)


def _run(runner: Runner, model: EagerRunner, batch: int, past: int, new: int, tokens: int) -> Outputs:
    """Every output of one call, with random tokens and, where it has one, a random cache."""
    rng = np.random.default_rng(0)
    mask = np.ones((batch, past + new), dtype=np.int64)
    ids = rng.integers(0, tokens, (batch, new))
    step = runner.prefill(ids, mask, default_positions(mask, new), _random_cache(model, rng, batch, past))
    return {"logits": step.logits, **step.present.arrays()}


def _random_cache(model: EagerRunner, rng: np.random.Generator, batch: int, past: int) -> ArrayCache | None:
    if not past:
        return None
    one = np.zeros((1, 1), dtype=np.int64)
    shapes = {name: array.shape for name, array in model.prefill(one, one + 1, one).present.arrays().items()}
    arrays = {
        name: rng.standard_normal((batch, shape[1], past, shape[3]), dtype=np.float32) for name, shape in shapes.items()
    }
    return ArrayCache(arrays, past)


def _allclose(rtol: float, atol: float) -> Close:
    return lambda wanted, found: bool(np.allclose(found, wanted, rtol=rtol, atol=atol))


def _torch_close(wanted: Array, found: Array) -> bool:
    try:
        torch.testing.assert_close(torch.from_numpy(found), torch.from_numpy(wanted))
    except AssertionError:
        return False
    return True


def _polygraphy_close(wanted: Array, found: Array) -> bool:
    """An element fails if it exceeds both tolerances."""
    error = np.abs(found - wanted)
    with np.errstate(divide="ignore", invalid="ignore"):
        return bool(((error <= 1e-5) | (error / np.abs(wanted) <= 1e-5)).all())


RULES = (
    Rule("`allclose` 1e-5 on a prompt", ((2, 0, 16),), _allclose(1e-5, 1e-5)),
    Rule("optimum-onnx, 1e-5", ((2, 0, 16), (2, 16, 1)), _allclose(1e-5, 1e-5)),
    Rule("`torch.onnx.verification`", ((2, 3, 2),), _torch_close),
    Rule("Polygraphy, 1e-5", ((1, 1, 1),), _polygraphy_close, tokens=2),
    Rule("llm-foundry, 1e-2", ((8, 0, 128),), _allclose(1e-2, 1e-2), logits_only=True),
)
