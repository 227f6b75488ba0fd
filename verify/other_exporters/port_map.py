"""PortMap: names and shapes of a decoder's inputs and outputs by one exporter; Binding: those of one graph.

`BUILT_IN` has one row per exporter. Other packages add a map with `register_port_map`, or with an entry point in the
group `llmconv.port_maps` whose object is a `PortMap`; `--input-map` also accepts a JSON file with the same fields.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import onnx

from llmconv.argument_checks import checked
from llmconv.checkpoint import read_json
from llmconv.errors import MalformedInput, UnsupportedInput, UsageProblem, short

PARTS = ("key", "value")
AXES = "bhtd"  # batch, heads, tokens, head size: the order of axes in comparisons
SHOWN = 6


@dataclass(frozen=True)
class PortMap:
    """The inputs and outputs ("ports") of one exporter's graphs.

    Attributes:
        name: value of `--input-map`.
        title: name of the exporter.
        producers: `producer_name` of its graphs; decides if a graph fits several maps.
        tokens, mask, positions: inputs; int64 or int32, `[batch, tokens]`, the mask `[batch, past and new tokens]`.
        logits: output `[batch, tokens, vocabulary]`, or of the last token only.
        branch: bool input for whether there is a past.
        past, present: templates of the cache's inputs and outputs; the first match counts.
        parts: values of a template's `{part}`, keys first.
        axes: order of the cache's axes: `b`atch, `h`eads, `t`okens, head size `d`.
        window: scalar inputs that receive the size of the sliding window.
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
            raise ValueError(f"`axes` must be a permutation of `{AXES}`, and `parts` two names")

    def cache_name(self, templates: Sequence[str], port: str) -> str:
        """The name in reports, such as `present.3.key`, of a cache input or output; empty for others."""
        found = next(filter(None, (self._match(template, port) for template in templates)), None)
        return f"present.{int(found['layer'])}.{PARTS[self.parts.index(found['part'])]}" if found else ""

    def fits(self, templates: Sequence[str], port: str) -> bool:
        return any(self._match(template, port) for template in templates)

    def _match(self, template: str, port: str) -> re.Match[str] | None:
        pattern = re.escape(template).replace(r"\{layer\}", r"(?P<layer>\d{1,6})")
        parts = "|".join(map(re.escape, self.parts))
        return re.fullmatch(pattern.replace(r"\{part\}", f"(?P<part>{parts})"), port)


@dataclass(frozen=True)
class Binding:
    """The inputs and outputs of one graph."""

    port_map: PortMap  # the map that fits
    inputs: frozenset[str]  # names of the inputs other than the cache
    # past, present: the cache's inputs and outputs by their names in reports, such as `present.3.key`
    past: Mapping[str, str] = field(default_factory=dict)
    present: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, row: PortMap, inputs: Sequence[str], outputs: Sequence[str]) -> Binding:
        """The inputs and outputs of a graph by a map, whether or not all of them fit."""
        past = {name: port for port in inputs if (name := row.cache_name(row.past, port))}
        present = {name: port for port in outputs if (name := row.cache_name(row.present, port))}
        return cls(row, frozenset(inputs) - set(past.values()), past, present)

    @property
    def takes_mask(self) -> bool:
        return self.port_map.mask in self.inputs

    @property
    def takes_positions(self) -> bool:
        return self.port_map.positions in self.inputs


def input_names(model: onnx.ModelProto) -> list[str]:
    """Inputs that a caller must provide; old graphs list their initializers as inputs, too."""
    weights = {tensor.name for tensor in model.graph.initializer}
    return [port.name for port in model.graph.input if port.name not in weights]


def bind(model: onnx.ModelProto, name: str, rows: Iterable[PortMap]) -> Binding:
    """The inputs and outputs of a graph by the first map that fits all of them.

    Maps in `rows` with the producer of the graph come first; `name` is for messages. Raises UnsupportedInput: no map
    fits.
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
    maps = f"the input map `{ordered[0].name}`: {odd[0]}" if len(ordered) == 1 else "any input map"
    raise UnsupportedInput(
        f"`{name}` does not fit {maps} (inputs {_listed(inputs)}; outputs {_listed(outputs)})",
        hint="give `--input-map FILE.json` with the names, see docs/verification-other-exporters.md; "
        "a decoder maps tokens to logits",
    )


def _fit(
    row: PortMap, inputs: list[str], outputs: list[str], ranks: Mapping[str, int]
) -> tuple[Binding | None, list[str]]:
    """The binding, or None and descriptions of the inputs and outputs that do not fit."""
    found = Binding.of(row, inputs, outputs)
    known = {row.tokens, row.mask, row.positions, row.branch}
    odd = [f"input `{port}`" for port in sorted(found.inputs - known) if not row.fits(row.window, port)]
    flat = (row.tokens, row.mask, row.positions)
    odd += [f"input `{port}` with {ranks[port]} axes" for port in flat if ranks.get(port, 0) not in (0, 2)]
    given = {row.logits, *found.present.values()}
    odd += [f"output `{port}`" for port in outputs if port not in given and not row.fits(row.ignored, port)]
    odd += [f"no input `{row.tokens}`"] if row.tokens not in inputs else []
    odd += [f"no output `{row.logits}`"] if row.logits not in outputs else []
    odd += [f"no output for the past `{name}`" for name in found.past if name not in found.present]
    return (None, odd) if odd else (found, [])


def _listed(names: Sequence[Any]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(f"`{short(name, 60)}`" for name in names[:SHOWN]) + more


LLMCONV = PortMap(name="llmconv", title="llmconv", producers=("llmconv",))
"""Graphs of llmconv without the manifest of their folder."""

BUILT_IN = (
    PortMap(name="genai", title="ONNX Runtime GenAI model builder", producers=("onnxruntime-genai",)),
    LLMCONV,
    PortMap(name="mobius", title="mobius-onnx", producers=("mobius",)),
    PortMap(name="optimum", title="optimum-onnx", producers=("pytorch",)),
    PortMap(
        name="transformers",
        title="transformers' exporter",
        producers=("pytorch",),
        past=("input.past_key_values.layers.{layer}.{part}", "past_key_values.layers.{layer}.{part}"),
        present=("output.past_key_values.layers.{layer}.{part}", "past_key_values.layers.{layer}.{part}"),
        parts=("keys", "values"),
        window=("input.past_key_values.layers.{layer}._sliding_window_tensor",),
        ignored=("output.past_key_values.layers.{layer}._sliding_window_tensor",),
    ),
)
"""Exporters: the model builder of onnxruntime-genai (keys come before all values), llmconv, `mobius build`,
`optimum-cli export onnx` (merged graphs and pairs), and `transformers.exporters` (flattened names, in two graphs).
"""

AUTO = "auto"

_registered: dict[str, PortMap] = {}


@checked
def register_port_map(port_map: PortMap) -> None:
    """Adds a map, or replaces the map with the same name."""
    _registered[port_map.name] = port_map


@cache
def _built_in() -> dict[str, PortMap]:
    maps = [*BUILT_IN, *(entry.load() for entry in entry_points(group="llmconv.port_maps"))]
    return {port_map.name: port_map for port_map in maps}


def port_maps() -> dict[str, PortMap]:
    return {**_built_in(), **_registered}


def find_port_maps(name: str) -> list[PortMap]:
    """The maps to try: all maps for `auto`, else the map with that name or from that JSON file.

    Raises UsageProblem: there is no such map and no such file; MalformedInput: the file is not an input map.
    """
    table = port_maps()
    if name == AUTO:
        return list(table.values())
    if name in table:
        return [table[name]]
    if not Path(name).is_file():
        raise UsageProblem(
            f"unknown input map `{name}`", hint=f"give {AUTO}, {', '.join(sorted(table))}, or a JSON file"
        )
    return [_from_json(Path(name))]


def _from_json(path: Path) -> PortMap:
    """The map in a JSON file, in which a list of names may be a single name."""
    given = {"name": path.stem, "title": path.name, **read_json(path, by_hand=True)}
    several = {field.name for field in fields(PortMap) if not isinstance(field.default, str)} - {"name", "title"}
    row: dict[str, Any] = {
        key: (value,) if key in several and isinstance(value, str) else value for key, value in given.items()
    }
    row = {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
    try:
        return PortMap(**row)
    except (TypeError, ValueError) as error:
        raise MalformedInput(
            f"`{path.name}` is not an input map: {error}", hint="docs/verification-other-exporters.md shows the fields"
        ) from error
