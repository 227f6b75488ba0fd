"""Suspect: the failing nodes with everything known about them, from which findings are derived."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import onnx
import torch

from llmconv.tensors import Array
from llmconv.verify.bisect.agreement_trace import AgreementTrace
from llmconv.verify.bisect.replay import ReplayedCall
from llmconv.verify.bisect.smallest_piece import FailingPiece
from llmconv.verify.results.report import Check, Where


@dataclass(frozen=True)
class Suspect:
    """A fault to be described.

    Attributes:
        replay: the failed call.
        where: the failed output.
        checks: of the whole run.
        trace: the values that agree.
        piece: the failing nodes; None if every node is correct.
    """

    replay: ReplayedCall
    where: Where
    checks: Sequence[Check]
    trace: AgreementTrace
    piece: FailingPiece | None

    @property
    def nodes(self) -> Sequence[onnx.NodeProto]:
        """The failing nodes; the fault is most likely the first."""
        return self.piece.nodes if self.piece else ()

    def scope(self, node: onnx.NodeProto) -> str:
        """The module of a node."""
        return self.trace.scope(node)

    def module(self, node: onnx.NodeProto) -> torch.nn.Module:
        """The eager model's module of a node."""
        return self.replay.model.get_submodule(self.scope(node))

    @property
    def config(self) -> Any:
        """The transformers config of the language model."""
        model: Any = self.replay.model
        return model.config.get_text_config(decoder=True)

    @cached_property
    def _constants(self) -> dict[str, onnx.TensorProto]:
        return {t.name: t for t in self.replay.probe.model.graph.initializer if not t.external_data}

    @cached_property
    def weights(self) -> set[str]:
        """Names of the initializers that are weights: external data, or named after a parameter of the model."""
        named = {name for name, _ in self.replay.model.named_parameters()}
        graph = self.replay.probe.model.graph
        return {t.name for t in graph.initializer if t.external_data or t.name in named}

    def constant(self, name: str) -> Array | None:
        """The value of an inline constant; None for other values."""
        if name in self._constants:
            return onnx.numpy_helper.to_array(self._constants[name])
        node = self.trace.index.maker.get(name)
        if node is not None and node.op_type == "Constant" and node.attribute[0].HasField("t"):
            return onnx.numpy_helper.to_array(node.attribute[0].t)
        return None

    def scalars(self, *ops: str) -> Iterator[tuple[onnx.NodeProto, float]]:
        """Single-element constants that nodes of these operators read."""
        for node in self.nodes:
            for name in node.input if node.op_type in ops else ():
                value = self.constant(name)
                if value is not None and value.size == 1:
                    yield node, float(value.reshape(()))

    def attributes(self, *names: str) -> Iterator[tuple[onnx.NodeProto, float]]:
        """Numeric attributes of the nodes, by these names."""
        for node in self.nodes:
            for attribute in node.attribute:
                if attribute.name in names:
                    yield node, attribute.f if attribute.type == onnx.AttributeProto.FLOAT else float(attribute.i)


@dataclass(frozen=True)
class Finding:
    """The description of a fault.

    Attributes:
        text: such as `epsilon 1e-05 in the graph, 1e-06 in the model`.
        node: the faulty node; None if no node is wrong.
    """

    text: str
    node: onnx.NodeProto | None = None


def differ(found: float, wanted: float) -> bool:
    """Whether two numbers differ in float32."""
    return not np.isclose(found, wanted, rtol=1e-6, atol=0)


def difference(what: str, found: float, wanted: float) -> str:
    """A text such as `epsilon 1e-05 in the graph, 1e-06 in the model`.

    Args:
        what: name of the number.
        found: its value in the graph.
        wanted: its value in the model.
    """
    return f"{what} {found:.6g} in the graph, {wanted:.6g} in the model"
