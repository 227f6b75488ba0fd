"""Type constraints of the inputs and outputs of operators."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import onnx


@dataclass(frozen=True)
class Parameter:
    """An input or output of an operator: its name and its type constraint, such as `T` or `tensor(int64)`."""

    name: str
    constraint: str


@dataclass(frozen=True)
class Signature:
    """Inputs and outputs of an operator as of `version`; the last one may be repeated."""

    version: int = 1
    inputs: tuple[Parameter, ...] = ()
    outputs: tuple[Parameter, ...] = ()

    def inputs_of(self, names: Iterable[str]) -> Iterator[tuple[str, Parameter]]:
        """The inputs of a node with their parameters, left out ones skipped."""
        return _paired(names, self.inputs)

    def outputs_of(self, names: Iterable[str]) -> Iterator[tuple[str, Parameter]]:
        """The outputs of a node with their parameters; left out ones stay, with an empty name."""
        return _paired(names, self.outputs, skip=False)


def _paired(
    names: Iterable[str], parameters: tuple[Parameter, ...], skip: bool = True
) -> Iterator[tuple[str, Parameter]]:
    for index, name in enumerate(names if parameters else ()):
        if name or not skip:
            yield name, parameters[min(index, len(parameters) - 1)]


@cache
def find_signature(domain: str, op_type: str, opset: int) -> Signature:
    """The signature of an operator; an empty one if neither onnx nor `signatures.json` defines it.

    Args:
        domain: "" for standard operators.
        op_type: the operator.
        opset: version of the domain that the graph imports.
    """
    try:
        schema = onnx.defs.get_schema(op_type, opset, domain)
    except onnx.defs.SchemaError:
        inputs, outputs = _own().get(f"{domain}:{op_type}".removeprefix(":"), ([], []))
        return Signature(1, tuple(map(Parameter, inputs, inputs)), tuple(map(Parameter, outputs, outputs)))
    formal = [tuple(Parameter(p.name, p.type_str) for p in side) for side in (schema.inputs, schema.outputs)]
    return Signature(schema.since_version, *formal)


@cache
def _own() -> dict[str, tuple[list[str], list[str]]]:
    """Signatures of onnxruntime's own operators."""
    found: dict[str, tuple[list[str], list[str]]] = json.loads((files(__package__) / "signatures.json").read_text())[
        "kernels"
    ]
    return found
