"""SinglePass: the model without a cache: logits of a text, embeddings, classes, or the score of a reranker."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, nn
from transformers import MODEL_MAPPING, PreTrainedModel

from llmconv.errors import UnsupportedInput
from llmconv.export.caches.traced_layers import TracedCache
from llmconv.export.export_options import CLASSIFY, EMBED, RERANK
from llmconv.export.graph_spec import GraphSpec
from llmconv.export.input_map import InputMap, Port
from llmconv.export.sentence_modules import Dense, SentenceHead, TokenScore
from llmconv.export.tracing.fake_model import depth
from llmconv.runtime.extra_inputs import BATCH, PAST, SEQUENCE, is_recurrent
from llmconv.runtime.library_patches import cache_parameter

RESULTS: dict[str, tuple[str, ...]] = {  # outputs of a graph by its task: of every token, then of the whole text
    "": ("logits",),
    EMBED: ("last_hidden_state", "sentence_embedding"),
    CLASSIFY: ("logits",),
    RERANK: ("scores",),
}


class SinglePass(nn.Module):
    """The model with what follows it for the task of a graph; Dense modules of the head become modules of the model.

    Raises UnsupportedInput: transformers has no model without a head for this config.
    """

    def __init__(self, model: PreTrainedModel, input_map: InputMap, spec: GraphSpec) -> None:
        super().__init__()
        if spec.task == EMBED and type(model.base_model) is not MODEL_MAPPING.get(type(model.config), None):
            raise UnsupportedInput(
                f"no embeddings of a {model.config.model_type}: the model without its head is another class",
                hint="export it without `--task`",
            )
        self.model, self._spec, self._input_map = model, spec, input_map
        self._states = [port for port in input_map.past(model.config) if input_map.kind.mixed]
        self._cache_name = cache_parameter(model.forward)
        if isinstance(spec.head, SentenceHead):
            for layer in spec.head.layers:
                if isinstance(layer, Dense):
                    with next(model.parameters()).fake_mode:
                        model.add_module(layer.path, _DenseModule(layer, model.dtype).eval())

    def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor | None) -> tuple[Tensor, ...]:
        """The outputs named in `RESULTS` for inputs int64 `[batch, sequence]`.

        Without `position_ids` they are counted from the mask where the family takes them.
        """
        given: dict[str, Any] = {"input_ids": input_ids, "attention_mask": attention_mask, **self._cache(input_ids)}
        if position_ids is None and self._input_map.position_ids:
            position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0)
        if position_ids is not None:
            given["position_ids"] = position_ids
        head = self._spec.head
        if self._spec.task == EMBED:
            hidden = self.model.base_model(**given).last_hidden_state
            pooled = [self._embedding(hidden, attention_mask, head)] if isinstance(head, SentenceHead) else []
            return (hidden, *pooled)
        logits = self.model(**given).logits.to(getattr(torch, self._spec.logits))
        if isinstance(head, TokenScore):  # the log-odds of the two tokens, `[batch]` of `[batch, vocab]`
            last = pick(logits, last_index(attention_mask))
            score = last[:, head.true_token]
            return (score if head.false_token is None else score - last[:, head.false_token],)
        return (logits,)

    def _cache(self, input_ids: Tensor) -> dict[str, Any]:
        """No cache; for a family with states one that is empty, because its scans begin with a state."""
        if not self._states:
            return {"use_cache": False}
        TracedCache.is_step = torch.zeros((), dtype=torch.bool)
        batch, half = input_ids.shape[0], self.model.dtype
        empty = []
        for port in self._states:
            shape = [batch, *(0 if size == PAST else int(size) for size in port.axes[1:])]
            empty.append(torch.zeros(shape, dtype=torch.float32 if is_recurrent(port.name) else half))
        cache = TracedCache([port.name for port in self._states], empty, depth(self.model.config))
        return {self._cache_name: cache, "use_cache": True}

    def _embedding(self, hidden: Tensor, mask: Tensor, head: SentenceHead) -> Tensor:
        """`[batch, features]` of the head, from `[batch, sequence, hidden]`."""
        embedding = torch.cat([POOLING[mode](hidden, mask) for mode in head.pooling], dim=-1)
        for layer in head.layers:
            if isinstance(layer, Dense):
                embedding = self.model.get_submodule(layer.path)(embedding)
            else:
                embedding = nn.functional.normalize(embedding, p=2, dim=-1)
        return embedding


class _DenseModule(nn.Module):
    """The Dense module of sentence-transformers, with its names of parameters."""

    def __init__(self, layer: Dense, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(layer.inputs, layer.outputs, bias=layer.bias, dtype=dtype)
        self.activation = getattr(nn, layer.activation)()

    def forward(self, embedding: Tensor) -> Tensor:
        """`[batch, outputs]` of `[batch, inputs]`."""
        result: Tensor = self.activation(self.linear(embedding))
        return result


def last_index(mask: Tensor) -> Tensor:
    """Index of the last real token of each row, int64 `[batch]`, with padding on either side."""
    return (mask * torch.arange(mask.shape[1])).amax(dim=1)


def first_index(mask: Tensor) -> Tensor:
    """Index of the first real token of each row, int64 `[batch]`."""
    last = mask.shape[1] - 1
    return last - (mask * (last - torch.arange(mask.shape[1]))).amax(dim=1)


def pick(rows: Tensor, index: Tensor) -> Tensor:
    """One token of each row: `[batch, features]` of `[batch, sequence, features]`."""
    return rows.gather(1, index[:, None, None].expand(-1, 1, rows.shape[-1])).squeeze(1)


def _mean(hidden: Tensor, weights: Tensor, power: float = 1.0) -> Tensor:
    """The weighted sum divided by a power of the sum of the weights `[batch, sequence]`, summed in float32."""
    rows = weights.to(torch.float32)[:, :, None]
    total = rows.sum(dim=1).clamp(min=1e-9)
    return ((hidden.to(torch.float32) * rows).sum(dim=1) / total**power).to(hidden.dtype)


def _weighted(hidden: Tensor, mask: Tensor) -> Tensor:
    """Later tokens count more: weights 1, 2, 3, … from the first real token."""
    numbers = torch.arange(1, mask.shape[1] + 1)[None] - first_index(mask)[:, None]
    return _mean(hidden, mask * numbers)


POOLING: dict[str, Any] = {  # `[batch, hidden]` of `[batch, sequence, hidden]` and the mask, by mode
    "cls": lambda hidden, mask: pick(hidden, first_index(mask)),
    "max": lambda hidden, mask: hidden.masked_fill(mask[:, :, None] == 0, float("-inf")).amax(dim=1),
    "mean": lambda hidden, mask: _mean(hidden, mask),
    "mean_sqrt_len_tokens": lambda hidden, mask: _mean(hidden, mask, 0.5),
    "weightedmean": _weighted,
    "lasttoken": lambda hidden, mask: pick(hidden, last_index(mask)),
}


def result_ports(spec: GraphSpec, model: ir.Model) -> tuple[Port, ...]:
    ports = []
    for name, value in zip(RESULTS[spec.task], model.graph.outputs, strict=False):
        assert value.shape is not None and value.dtype is not None
        dynamic = 2 if name == RESULTS[EMBED][0] else 1
        rest = tuple(int(size) for size in value.shape[dynamic:])  # type: ignore[arg-type]
        ports.append(Port(name, value.dtype.numpy().name, (BATCH, SEQUENCE)[:dynamic] + rest))
    return tuple(ports)
