"""Graphs with inputs for LoRA factors, verified with an adapter: its factors are constants of copies in memory."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import onnx
from onnx import numpy_helper

from llmconv.convert.lora_factors import lora_factors
from llmconv.convert.opening.adapters import is_for_peft
from llmconv.errors import UsageProblem, listing
from llmconv.files.sources import local_path
from llmconv.runtime.onnxruntime.lora_names import declared_factors, module_of, require_factors, without_inputs
from llmconv.tensors import Array
from llmconv.verify.bisect.replay import VerifiedFolder
from llmconv.verify.reference.eager import Eager

NAMED = ", with the adapter"
"""Suffix of the names of the scenarios."""


def adapted(
    verified: VerifiedFolder, reference: Path, adapter: str | Path, code: Path | None
) -> tuple[VerifiedFolder, Eager]:
    """The graphs with the factors of an adapter, and the eager model with PEFT's adapter around its layers.

    Args:
        verified: the graphs.
        reference: the model's folder.
        adapter: a LoRA adapter in PEFT's own files; PEFT is the reference.
        code: the reference's folder where its own code is trusted.

    Raises:
        InputRefused: the graphs have no inputs for the modules of the adapter, or it is of another model.
        UnsupportedInput: another kind of adapter than LoRA.
        UsageProblem: not an adapter of PEFT.
    """
    path = local_path(adapter)
    if not is_for_peft(path):
        raise UsageProblem(
            f"`--adapter` compares with PEFT, and `{path}` is not a PEFT adapter with safetensors weights",
            hint="merge it with `llmconv merge-lora`, and verify graphs of the result",
        )
    declared = {name: declared_factors(model) for name, model in verified.models.items()}
    if not all(declared.values()):
        raise without_inputs("or verify graphs of the merged model")
    factors = lora_factors(reference, path)
    for inputs in declared.values():
        require_factors(factors, inputs)
    eager = Eager(reference, "float32", code=code, adapter=path)
    return verified.changed(partial(_bake, factors=factors), NAMED), eager


def unseen_factors(models: Mapping[str, onnx.ModelProto], adapter: str | Path | None) -> list[str]:
    """The inputs for factors that run with their empty defaults only, in words.

    Args:
        models: the graphs, with the factors of the adapter if there is one.
        adapter: the adapter.
    """
    modules = sorted({module_of(name) for model in models.values() for name in declared_factors(model)})
    if not modules:
        return []
    if adapter is None:
        return ["faults of LoRA factors (`--adapter` runs them)"]
    return [f"faults of LoRA factors of {listing(modules)}"]


def _bake(model: onnx.ModelProto, factors: Mapping[str, Array]) -> None:
    """Makes the factors constants of a graph, in place; inputs of other modules keep their defaults."""
    graph = model.graph
    kept = [tensor for tensor in graph.initializer if tensor.name not in factors]
    ports = [port for port in graph.input if port.name not in factors]
    given = [numpy_helper.from_array(array, name) for name, array in factors.items()]
    for field, content in ((graph.initializer, [*kept, *given]), (graph.input, ports)):
        copies = [type(item).FromString(item.SerializeToString()) for item in content]
        del field[:]
        field.extend(copies)
