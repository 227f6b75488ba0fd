"""`--postprocess`: the graph returns the most likely tokens and their log-probabilities instead of logits."""

from __future__ import annotations

import re
from dataclasses import dataclass

import onnx_ir as ir

from llmconv.errors import UsageProblem
from llmconv.export.node_editor import NodeEditor, integers, value_named

TOKENS, SCORES = "tokens", "scores"
"""Names of the outputs, see `choose_tokens`."""


@dataclass(frozen=True)
class TokenChoice:
    """Number of tokens that the graph chooses at every position: `argmax` or `topk:K`.

    `count` is K, or None for `argmax`, whose outputs have no axis K.
    """

    text: str
    count: int | None

    @classmethod
    def parse(cls, text: str) -> TokenChoice:
        """The choice described by `argmax` or `topk:K`; UsageProblem for any other text, or a K of 0."""
        if text == "argmax":
            return cls(text, None)
        found = re.fullmatch(r"topk:(\d{1,9})", text)
        if found and not int(found[1]):
            raise UsageProblem(f"`--postprocess {text}` chooses no tokens", hint="give a K of 1 or more")
        if not found:
            raise UsageProblem(f"unknown `--postprocess {text}`", hint="give `argmax` or `topk:K`, such as `topk:40`")
        return cls(text, int(found[1]))


def choose_tokens(model: ir.Model, choice: TokenChoice) -> None:
    """Replaces the output `logits` by `tokens` (int64) and `scores` (float32), in place.

    Both are `[batch_size, sequence_length]` for `argmax`, usable as the next `input_ids`, and `[…, K]` for `topk:K`,
    most likely first; of equally likely tokens the lower id first. A score is the natural logarithm of the token's
    probability over the whole vocabulary: `logit - logsumexp(logits)`.

    Raises:
        UsageProblem: K is larger than the vocabulary.
    """
    graph = model.graph
    logits = value_named(graph.outputs, "logits")
    assert logits is not None and logits.shape is not None
    *axes, vocabulary = logits.shape
    if choice.count and isinstance(vocabulary, int) and choice.count > vocabulary:
        raise UsageProblem(
            f"`--postprocess {choice.text}` exceeds the vocabulary of {vocabulary} tokens",
            hint="give a smaller K",
        )
    logits.name = "postprocess/logits"
    editor = NodeEditor(graph, scope="postprocess")
    best, tokens = _most_likely(editor, logits, choice.count)
    total = editor.one("ReduceLogSumExp", [logits, integers(graph, -1)], {"keepdims": int(choice.count is not None)})
    scores = editor.one("Sub", [best, total])
    if choice.count is not None:
        axes.append(choice.count)
    for value, name, dtype in ((tokens, TOKENS, ir.DataType.INT64), (scores, SCORES, ir.DataType.FLOAT)):
        value.name, value.shape, value.type = name, ir.Shape(axes), ir.TensorType(dtype)
    logits.shape = logits.type = None
    graph.outputs[:] = [tokens, scores, *(value for value in graph.outputs if value is not logits)]


def _most_likely(editor: NodeEditor, logits: ir.Value, count: int | None) -> tuple[ir.Value, ir.Value]:
    """The largest logits, and their tokens."""
    if count is None:
        best = editor.one("ReduceMax", [logits, integers(editor.graph, -1)], {"keepdims": 0})
        return best, editor.one("ArgMax", [logits], {"axis": -1, "keepdims": 0})
    best, tokens = editor.add("TopK", [logits, integers(editor.graph, count)], {"axis": -1}, outputs=2)
    return best, tokens
