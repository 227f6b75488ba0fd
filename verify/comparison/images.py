"""Compares the graph of a vision tower with the eager model, and answers about images from the pixels to the logits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from llmconv.errors import LlmconvError
from llmconv.runtime.eager.images import image_features, image_token, prefill_images
from llmconv.runtime.eager.runner import EagerRunner
from llmconv.runtime.onnxruntime.graph import OrtGraph
from llmconv.runtime.onnxruntime.runner import OrtRunner
from llmconv.runtime.onnxruntime.vision import IMAGE_FEATURES, VISION, VisionGraph
from llmconv.runtime.placed_embeddings import PlacedEmbeddings
from llmconv.runtime.runner import Step, default_positions
from llmconv.tensors import Array
from llmconv.verify.comparison.candidates import Candidate, fold, with_checked_noise
from llmconv.verify.reference.chain_runs import rows_of
from llmconv.verify.reference.eager import Eager
from llmconv.verify.results.report import Check
from llmconv.verify.results.sigma import GATES, ExpectedOutput, Gates, Measure, NoiseFloor, measure
from llmconv.verify.scenarios.calls import Call

FEATURES, ANSWERS = "features of images", "prompts with images"
COUNTS = (1, 3)
"""Numbers of images per call."""

CONTRASTS = (1.0, 0.1, 4.0)
"""Sizes of pixel values: usual ones have a standard deviation of 1."""

BEFORE, AFTER, SEED = 2, 3, 31


@dataclass(frozen=True)
class ImageChecks:
    """The checks of a folder with a vision graph.

    Attributes:
        vision: the graph.
        eager: the multimodal model.
        gates: the largest sigma that passes.
    """

    vision: VisionGraph
    eager: Eager
    gates: Gates

    def features(self) -> Check:
        """One check of the features of several images, in several batches."""
        floor = NoiseFloor(self.eager.dtype, self.eager.width)
        pixels = [self._pixels(count, contrast) for contrast in CONTRASTS for count in COUNTS]
        blank = Check(FEATURES, VISION, IMAGE_FEATURES)
        found = [self._measure_features(floor, one) for one in pixels]
        return fold(blank, IMAGE_FEATURES, found, GATES[self.eager.dtype])

    def _measure_features(self, floor: NoiseFloor, pixels: Array) -> Measure:
        model, rounded_model = self.eager.eager_runners
        exact, rounded = image_features(model, pixels), image_features(rounded_model, pixels)
        truth = floor.truth(IMAGE_FEATURES, exact, rounded, np.ones(exact.shape[:2], dtype=bool))
        try:
            return measure(truth, self.vision.run(pixels))
        except LlmconvError as error:
            return Measure(problem=error.message)

    def answers(self, graph: OrtGraph) -> list[Check]:
        """One check per output: a batch of prompts with an image each, then one token.

        Args:
            graph: takes embeddings.
        """
        blank = Check(ANSWERS, graph.name, "")
        prompt, step = self._calls
        candidate = Candidate(graph.name, OrtRunner(graph, graph), (graph,))
        if reason := candidate.refuses(prompt) or candidate.refuses(step):
            return [replace(blank, output="logits", verdict="skip", detail=reason)]
        try:
            first = candidate.runner.prefill_placed(
                prompt.input_ids, prompt.attention_mask, prompt.position_ids, None, self._placed(prompt)
            )
            second = candidate.runner.decode(*_inputs(step), first.present)
        except LlmconvError as error:
            return [replace(blank, output="logits", verdict="fail", detail=error.message)]
        if first.choices is not None:
            return [replace(blank, output="logits", verdict="skip", detail="the graph chooses tokens")]
        measures = [
            self._measured(truths, made, last=candidate.last_logits and not number)
            for number, (truths, made) in enumerate(zip(self._truths, (first, second), strict=True))
        ]
        return [fold(blank, name, [found[name] for found in measures], self.gates) for name in measures[0]]

    def _measured(self, truths: dict[str, ExpectedOutput], made: Step, *, last: bool) -> dict[str, Measure]:
        rows = rows_of(made)
        expected = {**truths, "logits": truths["logits"].last()} if last else truths
        return {name: self._measure(truth, rows.get(name)) for name, truth in expected.items()}

    def _measure(self, truth: ExpectedOutput, rows: Array | None) -> Measure:
        if rows is None:
            return Measure(problem="missing output")
        return with_checked_noise(truth, lambda truth: measure(truth, rows), self.gates)

    def _placed(self, prompt: Call) -> PlacedEmbeddings:
        features = self.vision.run(self._pixels(2))
        return PlacedEmbeddings(self._places(prompt), features.reshape(-1, features.shape[-1]).astype(np.float32))

    def _places(self, prompt: Call) -> Array:
        found: Array = prompt.input_ids == image_token(self.eager.eager_runners[0])
        return found

    @cached_property
    def _truths(self) -> list[dict[str, ExpectedOutput]]:
        """Every output of the whole eager model on pixels and tokens: of the prompts, then of one more token each."""
        prompt, step = self._calls
        pixels = self._pixels(2)

        def first(model: EagerRunner) -> Step:
            return prefill_images(model, prompt.input_ids, prompt.attention_mask, pixels)

        def second(model: EagerRunner) -> Step:
            return model.decode(*_inputs(step), first(model).present)

        return [self.eager.outputs_of(prompt, first), self.eager.outputs_of(step, second)]

    @cached_property
    def _calls(self) -> tuple[Call, Call]:
        """Two prompts with an image each, one of them padded on the left, and the token after them."""
        random, image = np.random.default_rng(SEED), image_token(self.eager.eager_runners[0])
        length = BEFORE + self.vision.tokens + AFTER
        ids = random.integers(0, self.eager.facts().vocab_size - 1, (2, length + 1))
        ids += ids >= image  # all tokens but that of images
        ids[:, BEFORE : BEFORE + self.vision.tokens] = image
        mask = np.ones_like(ids)
        mask[1, 0] = 0
        positions = default_positions(mask, length + 1)
        prompt = Call(ids[:, :length], mask[:, :length], positions[:, :length])
        return prompt, Call(ids[:, length:], mask, positions[:, length:])

    def _pixels(self, count: int, contrast: float = 1.0) -> Array:
        pixels = np.random.default_rng(SEED).standard_normal((count, *self.vision.shape)) * contrast
        return pixels.astype(np.float16 if self.eager.dtype == "float16" else np.float32).astype(np.float32)


def _inputs(call: Call) -> tuple[Array, Array, Array]:
    return call.input_ids, call.attention_mask, call.position_ids
