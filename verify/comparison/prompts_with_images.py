"""PromptsWithImages: a batch of two prompts with images, run whole or in two parts, and one more token each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from llmconv.runtime.extra_inputs import ExtraInput
from llmconv.runtime.given_inputs import GivenInputs, batch_values
from llmconv.runtime.images.family import Features, Given, ImageFamily
from llmconv.runtime.placed_embeddings import PlacedEmbeddings
from llmconv.runtime.runner import Extras, Runner, Step, default_positions
from llmconv.tensors import Array
from llmconv.verify.scenarios.calls import Call

BEFORE, BETWEEN, AFTER, SEED = 2, 1, 3, 31
"""Number of tokens of text before, between and after images; seed of tokens and pixels."""


@dataclass(frozen=True)
class PromptsWithImages:
    """A batch of two prompts with equally many features, one of them padded on the left, and one more token each.

    Attributes:
        family: of the model.
        images: of each prompt, as a processor returns them.
        where: which tokens are placeholders, bool [batch, tokens].
        prompt: the prompts.
        step: one more token for each.
        known: extra inputs of the decoder by name, resolved.
    """

    family: ImageFamily
    images: Sequence[Given]
    where: Array
    prompt: Call
    step: Call
    known: Mapping[str, ExtraInput]

    @property
    def together(self) -> Given:
        """The images of all prompts."""
        return {name: np.concatenate([one[name] for one in self.images]) for name in self.images[0]}

    def values(self, call: Call, features: Sequence[Features]) -> Extras:
        """The values of the decoder's extra inputs that depend on images, in a call.

        Args:
            call: `prompt` or `step`.
            features: of the images of each prompt.
        """
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
        return (
            Call(ids[:, :cut], mask[:, :cut], positions[:, :cut]),
            Call(ids[:, cut:], mask, positions[:, cut:]),
        )

    def run_in_parts(self, runner: Runner, features: Sequence[Features]) -> Step:
        """The prompts in two runs; the results are those of the second.

        Args:
            runner: takes embeddings.
            features: of the images of each prompt.
        """
        placed, (first, second) = self._placed(features), self.parts
        cut, total = first.input_ids.shape[1], self.where.shape[1]
        past = runner.prefill(*first.tokens.arrays, None, self.values(first, features), placed.columns(0, cut)).present
        return runner.prefill(*second.tokens.arrays, past, self.values(second, features), placed.columns(cut, total))

    def _placed(self, features: Sequence[Features]) -> PlacedEmbeddings:
        return PlacedEmbeddings(self.where, np.concatenate([one.rows for one in features]).astype(np.float32))

    def run(self, runner: Runner, features: Sequence[Features]) -> tuple[Step, Step]:
        """The prompts, and then the step.

        Args:
            runner: takes embeddings.
            features: of the images of each prompt.
        """
        placed, values = self._placed(features), self.values(self.prompt, features)
        first = runner.prefill(*self.prompt.tokens.arrays, None, values, placed)
        return first, runner.decode(*self.step.tokens.arrays, first.present, self.values(self.step, features))


def calls_of(counts: Iterable[int], image: int, vocabulary: int) -> tuple[Call, Call]:
    """Two prompts of random tokens with equally many placeholders, one padded on the left, and the token after them.

    Args:
        counts: number of placeholders of each image.
        image: the placeholder token.
        vocabulary: number of tokens.
    """
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
