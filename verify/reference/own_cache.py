"""Whether a model computes the same after a cache as on the whole text: otherwise no graph with a cache is it."""

from __future__ import annotations

import numpy as np

from llmconv.tensors import Array
from llmconv.verify.reference.chain_runs import run_chain
from llmconv.verify.reference.eager import Eager
from llmconv.verify.results.report import Check
from llmconv.verify.scenarios.calls import Chain, ModelFacts, chain, full_mask

NAME = "the model's own cache"
LENGTHS = (5, 1, 1, 1)
"""Tokens of a prompt, and of the calls after it."""

LIMIT = 1e-4
"""Largest difference in float64, as a share of the logits' RMS; 1e-15 in every exported family of transformers."""

SEED = 8


def own_cache_chains(facts: ModelFacts) -> tuple[Chain, Chain]:
    """A text in one call, and the same text in several, each on the cache of the previous."""
    mask = full_mask(1, sum(LENGTHS))
    whole, pieces = (chain(mask, lengths, facts, np.random.default_rng(SEED)) for lengths in ((len(mask[0]),), LENGTHS))
    return whole, pieces


def check_own_cache(eager: Eager, graphs: list[str]) -> list[Check]:
    """A failed check for each graph if the model's logits after a cache differ from those without; else none.

    All other checks compare a graph with the model on a cache of its own. A model whose tokens attend to later ones
    agrees there with a graph, and both are wrong.

    Args:
        eager: the model.
        graphs: names of the graphs.
    """
    whole, pieces = own_cache_chains(eager.facts())
    exact = eager.runners[0]
    if eager.is_layered:
        expected = run_chain(exact, whole)[0].logits
    else:
        expected = eager.eager_runners[0].without_cache(whole[0].tokens)
    found = np.concatenate([step.logits for step in run_chain(exact, pieces)], axis=1)
    error = _relative(found, expected)
    detail = (
        f"the model's logits after a cache differ by {error:.2g} of their size from those without: tokens attend to "
        "later ones, as those of an encoder do, or its cache is wrong"
    )
    return [Check(NAME, name, "", verdict="fail", detail=detail) for name in graphs] if not error <= LIMIT else []


def _relative(found: Array, expected: Array) -> float:
    """The RMS of a difference as a share of that of what was expected."""
    size = np.sqrt(np.mean(np.square(expected))) or 1.0
    return float(np.sqrt(np.mean(np.square(found - expected))) / size)
