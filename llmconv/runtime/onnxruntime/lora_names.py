"""Names of the graph inputs for LoRA factors, shared by the exporter, the runner and the verifier.

    {module}.lora_A.weight   [rank, in]     {module}.weight is the name of the stored matrix
    {module}.lora_B.weight   [out, rank]    the scale alpha/rank included

Both are inputs with a default: empty factors of rank 0, with which the graph computes the base model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx

from llmconv.errors import InputRefused, listing
from llmconv.tensors import Array

FACTOR_A, FACTOR_B = ".lora_A.weight", ".lora_B.weight"


def factor_names(module: str) -> tuple[str, str]:
    """The names of the inputs of a module."""
    return f"{module}{FACTOR_A}", f"{module}{FACTOR_B}"


def is_factor(name: str) -> bool:
    """Whether the name is that of a LoRA factor."""
    return name.endswith((FACTOR_A, FACTOR_B))


def require_factors(factors: Mapping[str, Array], inputs: Mapping[str, Sequence[int | str]]) -> None:
    """Raises InputRefused unless pairs of factors A [rank, in] and B [out, rank] fit the declared shapes of inputs."""
    if absent := sorted({module_of(name) for name in factors if name not in inputs}):
        there = sorted({module_of(name).rpartition(".")[2] for name in inputs})
        raise InputRefused(
            f"the graphs have no LoRA inputs for {listing(absent)}",
            hint=f"they have some for {', '.join(there)}: export again with other `--lora-inputs`, or merge the "
            "adapter: `llmconv merge-lora BASE ADAPTER -o OUT`",
        )
    for module in {module_of(name) for name in factors}:
        first, second = factor_names(module)
        a, b = factors.get(first), factors.get(second)
        wanted = inputs[first][-1], inputs[second][0]
        if a is None or b is None or a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1]:
            raise InputRefused(f"incomplete LoRA factors for `{module}`", hint="write the adapter again")
        if (a.shape[1], b.shape[0]) != wanted:
            raise InputRefused(
                f"shape mismatch for the LoRA factors of `{module}`: expected {wanted[0]} inputs and {wanted[1]} "
                f"outputs, got {a.shape[1]} and {b.shape[0]}",
                hint="the adapter was trained on another model",
            )


def without_inputs(way_out: str) -> InputRefused:
    """The error for an adapter and graphs that take none; `way_out` is the alternative to an export with inputs."""
    return InputRefused(
        "the graphs have no inputs for LoRA factors", hint=f"export them with `--lora-inputs all-linear`, {way_out}"
    )


def declared_factors(model: onnx.ModelProto) -> dict[str, list[int | str]]:
    """The declared shapes of a graph's inputs for LoRA factors, by name."""
    defaults = {tensor.name for tensor in model.graph.initializer if is_factor(tensor.name)}
    return {
        port.name: [axis.dim_param or axis.dim_value for axis in port.type.tensor_type.shape.dim]
        for port in model.graph.input
        if port.name in defaults
    }


def module_of(name: str) -> str:
    """The module of a factor, or of the weight of that module."""
    for ending in (FACTOR_A, FACTOR_B, ".weight"):
        if name.endswith(ending):
            return name.removesuffix(ending)
    return name
