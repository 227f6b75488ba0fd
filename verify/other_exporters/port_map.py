"""PortMap: how one exporter names and shapes a decoder's inputs and outputs; Binding: the same for one graph."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx

from llmconv.errors import UnsupportedInput

PARTS = ("key", "value")
AXES = "bhtd"
"""Batch, heads, tokens, head size: the order in which everything is compared."""
SHOWN = 6


@dataclass(frozen=True)
class PortMap:
    """A row of the table of exporters.

    Attributes:
        name: what `--input-map` takes.
        title: for people.
        producers: what graphs of this exporter name as their producer; decides where names fit several rows.
        tokens, mask, positions: inputs; int64 or int32, `[batch, tokens]`, the mask `[batch, past and new tokens]`.
        logits: output `[batch, tokens, vocabulary]`, or of the last token only.
        branch: a bool input that says whether there is a past.
        past, present: what the cache's inputs and outputs are called; the first template that fits counts.
        parts: what a template's `{part}` stands for, keys first.
        axes: order of the cache's axes: `b`atch, `h`eads, `t`okens, head size `d`.
        window: scalar inputs of sliding layers that are the model's window.
        ignored: outputs that are not compared.
    """

    name: str
    title: str
    producers: tuple[str, ...] = ()
    tokens: str = "input_ids"
    mask: str = "attention_mask"
    positions: str = "position_ids"
    logits: str = "logits"
    branch: str = "use_cache_branch"
    past: tuple[str, ...] = ("past_key_values.{layer}.{part}",)
    present: tuple[str, ...] = ("present.{layer}.{part}",)
    parts: tuple[str, str] = PARTS
    axes: str = AXES
    window: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ("hidden_states",)

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not all(isinstance(text, str) for text in (value if isinstance(value, tuple) else (value,))):
                raise ValueError(f"`{name}` is {value!r}")
        if sorted(self.axes) != sorted(AXES) or len(self.parts) != len(PARTS):
            raise ValueError(f"axes are an order of `{AXES}`, parts are two words")

    def cache_name(self, templates: Sequence[str], port: str) -> str:
        """`present.3.key` of a port of the cache; empty for any other port."""
        found = next(filter(None, (self._match(template, port) for template in templates)), None)
        return f"present.{int(found['layer'])}.{PARTS[self.parts.index(found['part'])]}" if found else ""

    def fits(self, templates: Sequence[str], port: str) -> bool:
        """Whether some template fits a port."""
        return any(self._match(template, port) for template in templates)

    def _match(self, template: str, port: str) -> re.Match[str] | None:
        pattern = re.escape(template).replace(r"\{layer\}", r"(?P<layer>\d{1,6})")
        parts = "|".join(map(re.escape, self.parts))
        return re.fullmatch(pattern.replace(r"\{part\}", f"(?P<part>{parts})"), port)


@dataclass(frozen=True)
class Binding:
    """The ports of one graph.

    Attributes:
        port_map: the row that fits.
        inputs: names of the inputs that are not cache.
        past, present: the cache's ports by the names that reports use, such as `present.3.key`.
    """

    port_map: PortMap
    inputs: frozenset[str]
    past: Mapping[str, str] = field(default_factory=dict)
    present: Mapping[str, str] = field(default_factory=dict)

    @property
    def takes_mask(self) -> bool:
        """Whether the graph can be told of padding."""
        return self.port_map.mask in self.inputs

    @property
    def takes_positions(self) -> bool:
        """Whether the graph takes positions of its caller's choice."""
        return self.port_map.positions in self.inputs


def input_names(model: onnx.ModelProto) -> list[str]:
    """What a caller must feed: old graphs list their initializers as inputs too."""
    weights = {tensor.name for tensor in model.graph.initializer}
    return [port.name for port in model.graph.input if port.name not in weights]


def bind(model: onnx.ModelProto, name: str, rows: Iterable[PortMap]) -> Binding:
    """The first row that all ports of a graph fit; rows that name its producer come first.

    Raises:
        UnsupportedInput: there is none.
    """
    inputs, outputs = input_names(model), [port.name for port in model.graph.output]
    ranks = {port.name: len(port.type.tensor_type.shape.dim) for port in model.graph.input}
    producer = model.producer_name
    ordered = sorted(rows, key=lambda row: producer not in row.producers)
    odd: list[str] = []
    for row in ordered:
        binding, odd = _fit(row, inputs, outputs, ranks)
        if binding:
            return binding
    rows_said = f"the input map `{ordered[0].name}`: {odd[0]}" if len(ordered) == 1 else "any input map"
    raise UnsupportedInput(
        f"`{name}` does not fit {rows_said} (inputs {_listed(inputs)}; outputs {_listed(outputs)})",
        hint="give `--input-map FILE.json` with the names, see docs/verification.md; a decoder takes tokens and gives "
        "logits",
    )


def _fit(
    row: PortMap, inputs: list[str], outputs: list[str], ranks: Mapping[str, int]
) -> tuple[Binding | None, list[str]]:
    """The binding, or what does not fit."""
    past = {row.cache_name(row.past, port): port for port in inputs}
    present = {row.cache_name(row.present, port): port for port in outputs}
    past.pop("", None)
    present.pop("", None)
    others = frozenset(inputs) - set(past.values())
    known = {row.tokens, row.mask, row.positions, row.branch}
    odd = [f"input `{port}`" for port in sorted(others - known) if not row.fits(row.window, port)]
    flat = (row.tokens, row.mask, row.positions)
    odd += [f"input `{port}` with {ranks[port]} axes" for port in flat if ranks.get(port, 0) not in (0, 2)]
    given = {row.logits, *present.values()}
    odd += [f"output `{port}`" for port in outputs if port not in given and not row.fits(row.ignored, port)]
    odd += [f"no input `{row.tokens}`"] if row.tokens not in inputs else []
    odd += [f"no output `{row.logits}`"] if row.logits not in outputs else []
    odd += [f"no output for the past `{name}`" for name in past if name not in present]
    return (None, odd) if odd else (Binding(row, others, past, present), [])


def _listed(names: Sequence[Any]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(f"`{str(name)[:60]}`" for name in names[:SHOWN]) + more
