"""Compares the graph of a vision tower with the eager model, and answers about images from the pixels to the logits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from llmconv.errors import LlmconvError
from llmconv.output.manifest import VISION
from llmconv.runtime.eager.runner import EagerRunner
from llmconv.runtime.eager.torch_runner import image_features, positions_after_images, prefill_images
from llmconv.runtime.extra_inputs import (
    DEEPSTACK_FEATURES,
    IMAGE_FEATURES,
    POSITIONS,
    ExtraInput,
    GivenInputs,
    batch_values,
)
from llmconv.runtime.images.family import Features, Given, ImageFamily
from llmconv.runtime.onnxruntime.graph import OrtGraph, VisionGraph
from llmconv.runtime.onnxruntime.runner import OrtRunner
from llmconv.runtime.runner import Extras, PlacedEmbeddings, Runner, Step, default_positions
from llmconv.tensors import Array
from llmconv.verify.comparison.candidates import Candidate, fold, measured_rows
from llmconv.verify.reference.eager import Eager
from llmconv.verify.reference.other_roundings import outputs_of
from llmconv.verify.results import Check, problem_of
from llmconv.verify.scenarios.calls import Call
from llmconv.verify.sigma import GATES, ExpectedOutput, Gates, Measure, NoiseFloor, measure

FEATURES, ANSWERS = "features of images", "prompts with images"


@dataclass(frozen=True)
class ImageChecks:
    """The checks of a folder with a vision graph, compared with the eager multimodal model."""

    vision: VisionGraph
    family: ImageFamily
    eager: Eager
    gates: Gates

    def features(self) -> Check:
        floor = NoiseFloor(self.eager.dtype, self.eager.width)
        blank = Check(FEATURES, VISION, IMAGE_FEATURES)
        found = [one for given in self._examples(SEED) for one in self._measure_features(floor, given)]
        return fold(blank, IMAGE_FEATURES, found, GATES[self.eager.dtype])

    def _measure_features(self, floor: NoiseFloor, given: Given) -> list[Measure]:
        exact, rounded = (image_features(model, given) for model in self.eager.eager_runners)
        try:
            found = self.family.features(self.vision.run, given)
        except LlmconvError as error:
            return [Measure(problem=problem_of(error))]
        parts = zip(*(_compared(features) for features in (exact, rounded, found)), strict=True)
        return [
            measure(floor.truth(IMAGE_FEATURES, true, near, np.ones(true.shape[:2], dtype=bool)), rows)
            for true, near, rows in parts
        ]

    def _examples(self, seed: int) -> list[Given]:
        """Images of prompts as a processor returns them, floats as numbers of the graph's dtype."""
        drawn = self.family.examples(self.vision.shape, np.random.default_rng(seed))
        return [{name: self._rounded(array) for name, array in given.items()} for given in drawn]

    def _rounded(self, array: Array) -> Array:
        if array.dtype.kind != "f":
            return array
        return array.astype(np.float16 if self.eager.dtype == "float16" else np.float32).astype(np.float32)

    def answers(self, graph: OrtGraph) -> list[Check]:
        """One check per output: batches of two prompts with an image each, and with two, then one token.

        The prompts also run in two parts, if that gives the same. The graph takes embeddings.
        """
        blank = Check(ANSWERS, graph.name, "")
        candidate = Candidate(graph.name, OrtRunner(graph, graph), (graph,))
        for prompts in self._prompts:
            whole = self.family.read_whole
            if reason := candidate.refuses(prompts.prompt, whole=whole) or candidate.refuses(prompts.step):
                return [replace(blank, output="logits", verdict="skip", detail=reason)]
        divides = [] if self.family.read_whole else list(enumerate(self._prompts))
        divided = [number for number, one in divides if not any(map(candidate.refuses, one.parts))]
        try:
            made = [one.run(candidate.runner, self._features_of(one)) for one in self._prompts]
            chosen = [self._prompts[number] for number in divided]
            parts = [one.run_in_parts(candidate.runner, self._features_of(one)) for one in chosen]
        except LlmconvError as error:
            return [replace(blank, output="logits", verdict="fail", detail=problem_of(error))]
        if made[0][0].choices is not None:
            return [replace(blank, output="logits", verdict="skip", detail="the graph chooses tokens")]
        measures = [
            self._measured(truths, step, last=candidate.last_logits and not number)
            for expected, steps in zip(self._truths, made, strict=True)
            for number, (truths, step) in enumerate(zip(expected, steps, strict=True))
        ]
        measures += [
            self._measured(self._truths_of_part(number), step, last=candidate.last_logits)
            for number, step in zip(divided, parts, strict=True)
        ]
        return [fold(blank, name, [found[name] for found in measures], self.gates) for name in measures[0]]

    def _truths_of_part(self, number: int) -> dict[str, ExpectedOutput]:
        """Every output of the whole prompts, the logits of the second part alone."""
        truths, (_, part) = self._truths[number][0], self._prompts[number].parts
        return {**truths, "logits": truths["logits"].last(part.input_ids.shape[1])}

    def _measured(self, truths: dict[str, ExpectedOutput], made: Step, *, last: bool) -> dict[str, Measure]:
        rows = outputs_of(made)
        expected = {**truths, "logits": truths["logits"].last()} if last else truths
        return {name: measured_rows(truth, rows.get(name), self.gates) for name, truth in expected.items()}

    def _features_of(self, prompts: PromptsWithImages) -> list[Features]:
        return [self.family.features(self.vision.run, given) for given in prompts.images]

    @cached_property
    def _prompts(self) -> list[PromptsWithImages]:
        token, vocabulary = self.eager.eager_runners[0].model.config.image_token_id, self.eager.facts().vocab_size
        first, second = self._examples(SEED), self._examples(SEED + 1)
        several = [(first[number], second[number]) for number in (0, 1)]
        counts = [self.family.features_of(given[0], self.vision.tokens) for given in several]
        made = [calls_of(count, token, vocabulary) for count in counts]
        known = self.eager.extra_inputs
        return [
            PromptsWithImages(self.family, images, call.input_ids == token, call, step, known)
            for images, (call, step) in zip(several, made, strict=True)
        ]

    @cached_property
    def _truths(self) -> list[list[dict[str, ExpectedOutput]]]:
        """For each of `_prompts` every output of the whole eager model on pixels and tokens, then on one more token."""
        return [self._truths_of(prompts) for prompts in self._prompts]

    def _truths_of(self, prompts: PromptsWithImages) -> list[dict[str, ExpectedOutput]]:
        call, step = prompts.prompt, prompts.step

        def first(model: EagerRunner) -> Step:
            return prefill_images(model, call.input_ids, call.attention_mask, prompts.together)

        def second(model: EagerRunner) -> Step:
            extras = dict(prompts.values(step, [image_features(model, given) for given in prompts.images]))
            present, counted = first(model).present, positions_after_images(model, step.position_ids)
            if counted is not None:  # transformers' own, because those in `extras` are compared with them
                extras[POSITIONS] = counted
            return model.decode(*step.tokens.arrays, present, extras)

        return [self.eager.outputs_of(call, first), self.eager.outputs_of(step, second)]


def _compared(features: Features) -> list[Array]:
    """The features, and the further ones of a family that has them, each [1, tokens, hidden]."""
    deep = [one[DEEPSTACK_FEATURES] for one in features.outputs if DEEPSTACK_FEATURES in one]
    return [features.rows[None], *([np.concatenate(deep)[None]] if deep else [])]


BEFORE, BETWEEN, AFTER, SEED = 2, 1, 3, 31
"""Number of tokens of text before, between and after images; seed of tokens and pixels."""


@dataclass(frozen=True)
class PromptsWithImages:
    """A batch of two prompts with equally many features, one of them padded on the left, and one more token each."""

    family: ImageFamily
    images: Sequence[Given]  # those of each prompt, as a processor returns them
    where: Array  # the placeholders, bool [batch, tokens]
    prompt: Call
    step: Call
    known: Mapping[str, ExtraInput]  # extra inputs of the decoder by name, resolved

    @property
    def together(self) -> Given:
        return {name: np.concatenate([one[name] for one in self.images]) for name in self.images[0]}

    def values(self, call: Call, features: Sequence[Features]) -> Extras:
        """Values of the decoder's extra inputs that depend on images, in the call `prompt` or `step`."""
        rows = []
        for where, mask, given, own in zip(self.where, self.prompt.attention_mask, self.images, features, strict=True):
            is_token = mask.astype(bool)
            rows.append(GivenInputs(int(is_token.sum()), self.family.inputs(where[is_token], own, given)))
        return batch_values(rows, call.tokens, self.where.shape[1], self.known)

    @property
    def parts(self) -> tuple[Call, Call]:
        """The prompts in two calls, of which the second begins within the first image."""
        ids, mask, positions = self.prompt.tokens.arrays
        cut = int(np.flatnonzero(self.where[0])[0]) + 1
        return (Call(ids[:, :cut], mask[:, :cut], positions[:, :cut]), Call(ids[:, cut:], mask, positions[:, cut:]))

    def run_in_parts(self, runner: Runner, features: Sequence[Features]) -> Step:
        """Runs the prompts in two calls; returns the results of the second. `runner` takes embeddings."""
        placed, (first, second) = self._placed(features), self.parts
        cut, total = first.input_ids.shape[1], self.where.shape[1]
        past = runner.prefill(*first.tokens.arrays, None, self.values(first, features), placed.columns(0, cut)).present
        return runner.prefill(*second.tokens.arrays, past, self.values(second, features), placed.columns(cut, total))

    def _placed(self, features: Sequence[Features]) -> PlacedEmbeddings:
        return PlacedEmbeddings(self.where, np.concatenate([one.rows for one in features]).astype(np.float32))

    def run(self, runner: Runner, features: Sequence[Features]) -> tuple[Step, Step]:
        """Runs the prompts, and then the step; returns both results. `runner` takes embeddings."""
        placed, values = self._placed(features), self.values(self.prompt, features)
        first = runner.prefill(*self.prompt.tokens.arrays, None, values, placed)
        return first, runner.decode(*self.step.tokens.arrays, first.present, self.values(self.step, features))


def calls_of(counts: Iterable[int], image: int, vocabulary: int) -> tuple[Call, Call]:
    """Two prompts of random tokens with equally many placeholders, one padded on the left, and a token after each."""
    random = np.random.default_rng(SEED)
    images = [np.repeat([False, True], [BETWEEN, count]) for count in counts]
    where = np.concatenate([np.zeros(BEFORE - BETWEEN, bool), *images, np.zeros(AFTER + 1, bool)])
    ids = random.integers(0, vocabulary - 1, (2, len(where)))
    ids += ids >= image  # all tokens but that of images
    ids[:, where] = image
    mask = np.ones_like(ids)
    mask[1, 0] = 0
    positions, last = default_positions(mask, len(where)), len(where) - 1
    prompt = Call(ids[:, :last], mask[:, :last], positions[:, :last])
    return prompt, Call(ids[:, last:], mask, positions[:, last:])
