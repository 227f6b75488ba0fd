"""Several texts that continue one cache of torch's model, which transformers extends in place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from llmconv.errors import UsageProblem
from llmconv.generation.loop import Conversation
from llmconv.runtime.eager.torch_runner import TorchRunner
from llmconv.runtime.extra_inputs import ModelCall
from llmconv.runtime.onnxruntime.joined_cache import JoinedCache
from llmconv.runtime.runner import Cache, Step, default_positions
from llmconv.tensors import Array
from tools.tiny_models import depth, save_tiny

START, ENDS = [20, 30, 40, 50, 60], ([21, 31], [22, 32, 42])


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of which some layers keep a state."""
    folder = tmp_path_factory.mktemp("hybrid")
    save_tiny("lfm2", folder, depth("lfm2"))
    return folder


def run(runner: TorchRunner, ids: list[int], past: Cache | None = None) -> Step:
    mask = np.ones((1, len(ids) + (past.length if past else 0)), np.int64)
    return runner.prefill(np.array([ids]), mask, default_positions(mask, len(ids)), past)


def test_two_texts_continue_the_keys_and_values_of_one_cache(tiny: Callable[[str], Path]) -> None:
    runner = TorchRunner(tiny("llama"))
    past = run(runner, START).present
    for end in ENDS:
        found, whole = run(runner, end, past), run(runner, START + end)
        np.testing.assert_allclose(found.logits, whole.logits[:, -1:], rtol=0, atol=1e-5)
        assert found.present.length == len(START + end)
        assert {array.shape[2] for array in past.arrays().values()} == {len(START)}


def test_states_that_were_continued_are_not_continued_again(hybrid: Path) -> None:
    runner, conversation = TorchRunner(hybrid), Conversation()
    past = run(runner, START).present
    conversation.keep(START, past)
    assert conversation.past([START + ENDS[0]], runner)
    run(runner, ENDS[0], past)
    assert not conversation.past([START + ENDS[1]], runner)  # so the whole text runs
    with pytest.raises(UsageProblem, match="a later call has continued the states"):
        run(runner, ENDS[1], past)


def test_a_row_runs_again_by_itself_after_a_step_of_all(hybrid: Path) -> None:
    runner = TorchRunner(hybrid)
    cache = JoinedCache.like(run(runner, START).present)
    for end in ENDS:
        cache.add(run(runner, START + end).present)
    new: Array = np.array([[33], [43]])
    for _ in range(2):  # of which the second extends what the first returned
        call = ModelCall(new, cache.mask(), default_positions(cache.mask(), 1))
        step = runner.decode(*call.arrays, cache.past())
        cache.grew(step.present)
        for row in range(2):
            ids, mask, positions = (array[row : row + 1] for array in call.arrays)
            alone = runner.decode(ids, mask, positions, cache.before(row))
            np.testing.assert_allclose(alone.logits[0], step.logits[row], rtol=0, atol=1e-5)
