"""Form: what is fixed about a graph, apart from the family: how its cache is kept, and which axes are numbers.

cache           past and present                     where new keys go
growing         past_sequence_length, total…         behind the past (Concat)
shared-buffer   both max_sequence_length, in place   at total_sequence_length - sequence_length
static          both --max-seq-len, in place         at the input `write_indices`, one per row
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from llmconv.errors import UnsupportedInput, UsageProblem
from llmconv.export.input_maps import BATCH, PAST, SEQUENCE, TOTAL, Port
from llmconv.runtime.onnxruntime.embeddings import INPUTS_EMBEDS
from llmconv.runtime.onnxruntime.shared_buffers import MAX_LENGTH, WRITE_INDICES

CACHE_RANK = 4
SHAPES, CACHES, TARGETS = ("dynamic", "static"), ("growing", "shared-buffer"), ("ort-cpu",)
"""The words of the command."""


@dataclass(frozen=True)
class Form:
    """One form of graph.

    Attributes:
        cache: `growing`, `shared-buffer` or `static`.
        batch_size, slots, sequence: rows, places in the buffer, new tokens of one call; None leaves the axis open.
        embeddings: the graph takes `inputs_embeds` of this size in the place of `input_ids`.
        target: the runtime whose own operators may be used, `ort-cpu`; None for standard ones.
        steps: several tokens come for one row only, which lets `GroupQueryAttention` do more.
    """

    cache: str = "growing"
    batch_size: int | None = None
    slots: int | None = None
    sequence: int | None = None
    embeddings: int | None = None
    target: str | None = None
    steps: bool = False

    @property
    def opset(self) -> int:
        """Version of the standard operators: `TensorScatter` came with 24."""
        return 23 if self.cache == "growing" else 24

    def recorded(self) -> dict[str, Any]:
        """What the manifest says: what is fixed, nothing of a growing cache."""
        fixed = {name: value for name, value in asdict(self).items() if value and name != "embeddings"}
        return {"form": fixed} if fixed != {"cache": "growing"} else {}

    def inputs(self, ports: Sequence[Port]) -> tuple[Port, ...]:
        """The inputs of a family's growing graph as this form has them; `write_indices` stands before the cache.

        Raises:
            UnsupportedInput: an input that no graph has, or the family keeps states, for which there are no buffers.
        """
        _require_known(ports)
        if self.cache != "growing" and any(port.name.startswith("past_") and PAST not in port.axes for port in ports):
            raise UnsupportedInput(
                "a cache of fixed length holds keys and values, and this family keeps states too",
                hint="leave out `--shapes static` and `--cache shared-buffer`",
            )
        if self.cache == "static" and all(port.name != "position_ids" for port in ports):
            raise UnsupportedInput(
                "this family counts tokens itself, and the rows of a static cache may stand at different lengths",
                hint="leave out `--shapes static`; `--cache shared-buffer` is for this family too",
            )
        if self.embeddings:
            ports = [_embedded(port, self.embeddings) for port in ports]
        fixed = [self._fixed(port) for port in ports]
        if self.cache != "static":
            return tuple(fixed)
        first = next(at for at, port in enumerate(ports) if PAST in port.axes)
        batch = self.batch_size or BATCH
        return (*fixed[:first], Port(WRITE_INDICES, "int64", (batch,)), *fixed[first:])

    def outputs(self, ports: Sequence[Port]) -> tuple[Port, ...]:
        """The outputs of a family's growing graph as this form has them."""
        return tuple(self._fixed(port) for port in ports)

    def _fixed(self, port: Port) -> Port:
        sizes: dict[str | int, str | int] = {BATCH: self.batch_size or BATCH, SEQUENCE: self.sequence or SEQUENCE}
        slots = self.slots or MAX_LENGTH
        if self.cache == "static":
            sizes |= {PAST: slots, TOTAL: slots}
        elif self.cache == "shared-buffer":
            sizes |= {PAST: slots, TOTAL: slots if len(port.axes) == CACHE_RANK else TOTAL}
        return replace(port, axes=tuple(sizes.get(axis, axis) for axis in port.axes))


GROWING = Form()
PROMPT_LIMIT = 128
"""Tokens at most of one call of a static prefill graph, where nothing else is asked for."""


def forms(
    roles: Sequence[str],
    shapes: str = "dynamic",
    cache: str = "growing",
    batch_size: int | None = None,
    max_seq_len: int | None = None,
    prompt_len: int | None = None,
    embeddings: int | None = None,
    target: str | None = None,
) -> dict[str, Form]:
    """The form of every graph; a static decode graph takes one token, and a static unified one any number.

    Args:
        roles: `prefill`, `decode`, `unified`.
        shapes: `dynamic`, or `static`: every axis is a number, and the cache lies in a buffer that is filled in place.
        cache: of dynamic graphs: `growing`, or `shared-buffer`: past and present are one buffer that is filled in
            place, as ORT-GenAI's `past_present_share_buffer` wants it.
        batch_size, max_seq_len: of static graphs: sequences (1 when left out), tokens that the cache holds.
        prompt_len: new tokens of one call of a static prefill graph; the largest divisor of `max_seq_len` up to 128
            when left out, so that every prompt that fits can be cut into such pieces.
        embeddings: size of the embeddings that the graphs take in the place of tokens.
        target: `ort-cpu` uses operators that onnxruntime alone has, where they were measured to be faster.

    Raises:
        UsageProblem: sizes that do not fit each other, or belong to another cache.
    """
    if shapes == "static":
        if cache != "growing":
            raise UsageProblem("static graphs have a cache of their own", hint=f"leave out `--cache {cache}`")
        form = Form("static", batch_size or 1, max_seq_len, None, embeddings, target)
        prompt = _piece(max_seq_len, prompt_len)
        sequences = {"prefill": prompt, "decode": 1, "unified": None}
        return {role: replace(form, sequence=sequences[role]) for role in roles}
    if batch_size or max_seq_len or prompt_len:
        raise UsageProblem(
            "`--batch-size`, `--max-seq-len` and `--prompt-len` fix axes", hint="give `--shapes static` too"
        )
    form = Form(cache, embeddings=embeddings, target=target)
    step = replace(form, steps=cache == "shared-buffer" and target is not None)
    return {role: step if role == "decode" else form for role in roles}


def _piece(slots: int | None, prompt: int | None) -> int:
    """New tokens of one call of a static prefill graph."""
    if not slots:
        raise UsageProblem("`--shapes static` needs the cache's length", hint="give `--max-seq-len S`")
    prompt = prompt or max(length for length in range(1, PROMPT_LIMIT + 1) if slots % length == 0)
    if slots % prompt:
        raise UsageProblem(
            f"a cache of {slots} tokens cannot be filled by pieces of {prompt}",
            hint="make `--max-seq-len` a multiple of `--prompt-len`",
        )
    return prompt


TOKEN_INPUTS = ("input_ids", "attention_mask", "position_ids")


def _require_known(ports: Sequence[Port]) -> None:
    """Refuses an input that a row of the registry adds: the trace would call the model without it."""
    odd = [port.name for port in ports if port.name not in TOKEN_INPUTS and not port.name.startswith("past_")]
    if odd:
        raise UnsupportedInput(
            f"the input map has an input `{odd[0]}`, which exported graphs cannot have",
            hint=f"leave it out of `InputMap.inputs`: graphs take {', '.join(TOKEN_INPUTS)} and the cache",
        )


def _embedded(port: Port, size: int) -> Port:
    return Port(INPUTS_EMBEDS, "float32", (*port.axes, size)) if port.name == "input_ids" else port
