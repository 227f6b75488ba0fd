"""Where a fault is: the layer that a mutant changed is the layer that is named."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from llmconv.verify import Check, verify
from llmconv.verify.bisect.first_wrong_node import localize
from llmconv.verify.reference.eager import Eager
from llmconv.verify.results import Where
from tests.builders.mutants.mutants import MUTANTS, Mutant
from tests.builders.slow_rows import each_value
from tests.conftest import CONFIGS

OUTSIDE = {
    "causal mask too narrow",
    "causal mask too wide",
    "padding ignored",
    "window off by one",
    "window one too short",
    "window dropped",
    "positions off by one",
    "position_ids ignored",
    "rotary base changed",
    "rotary table in half precision",
    "ALiBi slope 1 % off",
    "mask of the first row for all",
    "mask too weak",
    "positions end at 31",
    "rotary angles 0.1 % too large",
    "rotated backwards",
    "embedding not scaled",
    "last token of the vocabulary unknown",
}
"""Mutants of nodes in front of the layers; they show in the first one."""
LAYERS = {mutant.name: None if mutant.name in OUTSIDE else mutant.layer for mutant in MUTANTS}
"""The layer that a mutant changes; None outside the layers."""

AUDIT = "`model.layers.7.mlp.up_proj.weight` differs from the reference's values"


def test_if_only_the_audit_fails_the_layer_of_the_weight_is_named() -> None:
    where = localize([Check("weights", "decode.onnx", "", verdict="fail", detail=AUDIT)])
    assert where and (where.layer, where.scope, where.finding) == (7, "model.layers.7.mlp.up_proj", AUDIT)


def test_a_weight_outside_the_layers_has_none() -> None:
    detail = "`lm_head.weight` maps the bytes of `model.embed_tokens.weight`"
    where = localize([Check("weights", "decode.onnx", "", verdict="fail", detail=detail)])
    assert where and (where.layer, where.scope) == (None, "lm_head")


def test_a_graph_that_does_not_run_is_reported_without_a_layer() -> None:
    where = localize([Check("prefill, 7 tokens", "a.onnx", "logits", verdict="fail", detail="it fails in onnxruntime")])
    assert where and where.text == "prefill, 7 tokens, a.onnx, step 0: it fails in onnxruntime"


def test_a_cache_that_was_not_compared_is_not_mentioned() -> None:
    where = localize([Check("prefill, 7 tokens", "a.onnx", "logits", sigma=40.0, verdict="fail")])
    assert where and where.text == "prefill, 7 tokens, a.onnx, step 0: the logits differ"


def brackets(layer: int | None, changed: int | None) -> bool:
    """Whether the first layer whose cache differs is what a change of that layer brings about."""
    return changed is None or layer in (changed, changed + 1)


def is_right(where: Where, mutant: Mutant) -> bool:
    """The node's layer; where no node could be named, the layer whose cache shows it."""
    if not where.node and not where.finding:
        return brackets(where.layer, LAYERS[mutant.name])
    first_norm = mutant.name.startswith("every norm") and where.layer is None  # of some families that of the embedding
    return first_norm or where.layer == LAYERS[mutant.name]


@pytest.mark.slow
def test_the_layer_that_was_changed_is_named(
    exported: Callable[[str], Path],
    broken: Callable[[str, Mutant], Path],
    eager: Callable[[str], Eager],
    tmp_path: Path,
) -> None:
    pairs = [(name, mutant) for name in CONFIGS for mutant in MUTANTS if name in mutant.families]
    some = each_value([{"family": name, "mutant": mutant} for name, mutant in pairs])[::3]
    chosen = pairs if os.environ.get("ROWS") == "all" else [pairs[at] for at in some]
    wrong: list[str] = []
    for number, (model_type, mutant) in enumerate(chosen):
        folder = broken(model_type, mutant).rename(tmp_path / str(number))
        report = verify(folder, reference=exported(model_type), eager=eager(model_type), bisect=True)
        first = localize(report.checks)
        assert first and report.where
        wrong += [] if is_right(report.where, mutant) else [f"{model_type}, {mutant.name}: {report.where.text}"]
        assert brackets(first.layer, LAYERS[mutant.name]), mutant.name
    print(f"{len(wrong)} of {len(chosen)} not localized to the right layer", *wrong, sep="\n")
    assert len(wrong) <= 0.05 * len(chosen)
