"""Fields of `GenerationConfig` that transformers computes: its logits processors, and its beam search.

The only module here that imports torch; it is loaded only if such a field is set.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedConfig
from transformers.generation import GenerationMixin, LogitsProcessorList
from transformers.modeling_outputs import CausalLMOutputWithPast

from llmconv.errors import UnsupportedInput, UsageProblem, first_line
from llmconv.generation.row import Past, PositionRule, require_numbers
from llmconv.generation.sampling import GenerationSettings
from llmconv.runtime.extra_inputs import GivenInputs, ModelCall, batch_values
from llmconv.runtime.runner import Runner, rows_of
from llmconv.tensors import Array

NEED_THE_MODEL = frozenset({"guidance_scale", "dola_layers", "penalty_alpha", "token_healing", "max_time"})
NEED_BEAMS = frozenset({"num_beam_groups", "diversity_penalty", "constraints", "force_words_ids"})
OF_THE_PROMPT = frozenset({"encoder_no_repeat_ngram_size", "encoder_repetition_penalty"})
"""Fields whose processors are made for one prompt: without it transformers leaves them out, with a warning."""
OF_THE_VOCABULARY = frozenset({"watermarking_config"})
"""Fields whose processors need the number of tokens, which is that of the logits."""
Processor = Callable[[Array, Array], Array]  # tokens [length] and logits [vocabulary] to scores [vocabulary]


class GraphModel(GenerationMixin):  # type: ignore[misc]
    """Any runner as a model that transformers generates with; `vocabulary` is the size of the logits.

    transformers runs it without a cache and passes all tokens at every step; the cache is kept here. The row of the
    previous step that a sequence continues is found by its tokens, so that beams may change places.
    """

    main_input_name = "input_ids"
    device = torch.device("cpu")
    dtype = torch.float32
    _is_stateful = False
    _supports_cache_class = False

    def __init__(
        self,
        runner: Runner | None = None,
        positions: PositionRule | None = None,
        vocabulary: int = 0,
        inputs: GivenInputs | None = None,
    ) -> None:
        self._runner, self._positions, self._inputs = runner, positions, inputs or GivenInputs(0)
        self.config = PreTrainedConfig(vocab_size=vocabulary, is_encoder_decoder=False)
        self.generation_config = GenerationConfig()
        self._past: Past | None = None
        self._ids, self._mask = np.zeros((0, 0), np.int64), np.zeros((0, 0), np.int64)

    def prepare_inputs_for_generation(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **given: Any
    ) -> dict[str, Any]:
        return {"input_ids": input_ids}

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **_: Any
    ) -> CausalLMOutputWithPast:
        """Logits of the last position, float32 [rows, 1, vocabulary], of rows without padding."""
        assert self._runner and self._positions
        ids = input_ids.numpy()
        mask = np.ones_like(ids)
        past = self._continued(ids)
        done = past.tokens if past else 0
        call = ModelCall(ids[:, done:], mask, self._positions(mask, ids.shape[1] - done))
        run = self._runner.decode if past else partial(self._runner.prefill, last_only=True)
        given = batch_values([self._inputs] * len(ids), call, self._inputs.tokens, self._runner.extra_inputs)
        step = run(*call.arrays, past.cache if past else None, given)
        if step.choices is not None:
            problem = "beam search needs all logits, but the graph returns only the tokens that it chose"
            raise UsageProblem(problem, hint="give `--num-beams 1`, or export without `--postprocess`")
        logits = step.logits[:, -1:].astype(np.float32)
        require_numbers(logits)
        self._past, self._ids = Past(step.present, ids.shape[1]), ids
        return CausalLMOutputWithPast(logits=torch.from_numpy(logits))

    __call__ = forward

    def _continued(self, ids: Array) -> Past | None:
        """The cache of all columns but the last, its rows in the order of `ids`."""
        assert self._runner
        if self._past is None or ids.shape[1] != self._past.tokens + 1 or self._runner.reads_again(self._past.tokens):
            return None
        known = {tokens.tobytes(): row for row, tokens in enumerate(self._ids)}
        rows = [known.get(tokens.tobytes(), -1) for tokens in ids[:, :-1]]
        if -1 in rows:
            return None
        is_same = rows == list(range(len(self._ids)))
        return self._past if is_same else Past(rows_of(self._past.cache, rows), self._past.tokens)


def search(
    model: GraphModel, prompt: Sequence[int], limit: int, settings: GenerationSettings, count: int = 1
) -> list[list[int]]:
    """At most `limit` new tokens, up to an end token, by transformers' beam search; the `count` best sequences first.

    Raises UsageProblem for settings that transformers does not accept; `count` is at most the number of beams.
    """
    ids = torch.tensor([list(prompt)])
    torch.manual_seed(settings.seed)
    try:
        config = generation_config(settings, limit)
        config.num_return_sequences = count
        found = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    except (ValueError, NotImplementedError) as error:
        problem = f"transformers does not accept the settings: {first_line(error)}"
        raise UsageProblem(problem, hint="see docs/generation.md") from error
    sequences = []
    for tokens in found[:, len(prompt) :].tolist():
        ends = (at for at, token in enumerate(tokens, start=1) if token in settings.eos_token_id)
        sequences.append(tokens[: next(ends, None)])  # padding follows
    return sequences


def processor(settings: GenerationSettings, prompt_tokens: int, limit: int) -> Processor:
    """A function that applies all of transformers' logits processors and filters to one sequence.

    `limit` is the maximum number of new tokens. Raises UnsupportedInput for a field that does not work on logits,
    UsageProblem for settings that transformers does not accept.
    """
    if refused := sorted(settings.extra.keys() & (NEED_THE_MODEL | NEED_BEAMS)):
        problem = f"`{refused[0]}` of the generation config is not supported"
        raise UnsupportedInput(problem, hint="remove it from generation_config.json")
    model, of_call = GraphModel(), bool(settings.extra.keys() & (OF_THE_PROMPT | OF_THE_VOCABULARY))

    def steps_of(prompt: torch.Tensor) -> LogitsProcessorList:
        config = generation_config(settings, limit)
        config.max_length = prompt_tokens + limit  # as `generate` sets it, for a forced last token
        model._prepare_special_tokens(config, kwargs_has_attention_mask=True)
        return model._get_logits_processor(
            config, input_ids_seq_length=prompt_tokens, encoder_input_ids=prompt, device="cpu"
        )

    try:
        made = [steps_of(torch.zeros((1, prompt_tokens), dtype=torch.long))]
    except Exception as error:  # its checks and constructors raise anything for an invalid value
        raise _refused(error) from error

    def scores(ids: Array, logits: Array) -> Array:
        given, tokens = torch.from_numpy(logits.astype(np.float32))[None], torch.from_numpy(ids)[None]
        try:
            if of_call and len(made) == 1:
                model.config.vocab_size = len(logits)
                made.append(steps_of(tokens[:, :prompt_tokens]))
            return np.asarray(made[-1](tokens, given)[0].numpy())
        except (TypeError, ValueError, IndexError, RuntimeError) as error:
            raise _refused(error) from error

    return scores


def _refused(error: Exception) -> UsageProblem:
    problem = f"transformers does not accept the generation config: {first_line(error)}"
    return UsageProblem(problem, hint="fix generation_config.json")


def generation_config(settings: GenerationSettings, limit: int) -> GenerationConfig:
    """The settings as transformers' object, for `limit` new tokens; without stop strings, which `Row` handles."""
    ends = sorted(settings.eos_token_id)
    sampling = {"temperature": settings.temperature, "top_k": settings.top_k, "top_p": settings.top_p}
    return GenerationConfig(
        max_new_tokens=limit,
        do_sample=not settings.is_greedy,
        **({} if settings.is_greedy else {**sampling, "min_p": settings.min_p}),
        repetition_penalty=settings.repetition_penalty,
        num_beams=settings.num_beams,
        eos_token_id=ends or None,
        pad_token_id=settings.pad_token_id if settings.pad_token_id is not None else (ends or [0])[0],
        bos_token_id=settings.bos_token_id,
        use_cache=False,
        **settings.extra,
    )
