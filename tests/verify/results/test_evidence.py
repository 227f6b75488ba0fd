"""What the page draws is what was measured."""

from __future__ import annotations

import numpy as np
import pytest

from llmconv.tensors import Array
from llmconv.verify.report.html import error_histogram, logit_scatter, position_map
from llmconv.verify.scenarios.calls import Call
from llmconv.verify.sigma import LOWEST, PER_DECADE, Evidence, ExpectedOutput, NoiseFloor, measure

RNG = np.random.default_rng(0)
EXACT = RNG.normal(size=(2, 5, 7))
VALID = np.array([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]], dtype=bool)
CALL = Call(np.zeros((2, 5), dtype=np.int64), VALID.astype(np.int64), np.zeros((2, 5), dtype=np.int64))


def truth() -> ExpectedOutput:
    """Of logits with the noise of float32."""
    return NoiseFloor("float32").truth("logits", EXACT, EXACT.astype(np.float32), VALID)


def seen(logits: Array) -> Evidence:
    """What is left of one call."""
    evidence = Evidence()
    evidence.see_logits("a scenario", CALL, truth(), logits)
    evidence.see_rows("logits", measure(truth(), logits, tokens=True), 3)
    return evidence


def test_every_valid_logit_is_counted_at_the_size_of_its_error() -> None:
    evidence = seen(EXACT + 2e-3)
    at = int((np.log10(2e-3) - LOWEST) * PER_DECADE)
    assert evidence.histogram.sum() == VALID.sum() * 7 == evidence.histogram[at]
    assert evidence.rows == VALID.sum()


def test_a_flip_has_its_margin_and_what_rounding_explains() -> None:
    logits = EXACT.copy()
    best = EXACT[1, 2].argsort()[::-1]
    logits[1, 2, best[:2]] = logits[1, 2, best[1::-1]]
    (flip,) = seen(logits).flips
    assert flip.row == (1, 2)
    assert flip.margin == pytest.approx(EXACT[1, 2, best[0]] - EXACT[1, 2, best[1]])
    assert 0 < flip.noise < flip.margin


def test_flips_under_padding_do_not_count() -> None:
    logits = EXACT.copy()
    logits[0, 0] = -logits[0, 0]
    assert seen(logits).flipped == 0


def test_a_broken_position_stands_out_where_it_lies() -> None:
    logits = EXACT.copy()
    logits[1, 4] += 1.0
    along = seen(logits).positions["logits"]
    assert along.argmax() == 3 + 4
    assert along[:3].max() == 0


def test_plots_are_drawn_only_with_data() -> None:
    assert [draw(Evidence()) for draw in (error_histogram, logit_scatter, position_map)] == ["", "", ""]
    evidence = seen(EXACT + 1e-3)
    assert error_histogram(evidence).count("<rect") >= 1
    assert logit_scatter(evidence).count("<circle") == len(evidence.points)
    assert "position 7: sigma" in position_map(evidence)
