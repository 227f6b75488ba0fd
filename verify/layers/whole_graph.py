"""Opens a whole graph without its weights, so that onnxruntime checks every node, type and shape at any size."""

from __future__ import annotations

from dataclasses import replace

import onnx

from llmconv.errors import first_line
from llmconv.memory import raise_if_out_of_memory
from llmconv.runtime.onnxruntime.guard import is_external
from llmconv.runtime.onnxruntime.session_settings import SessionSettings
from llmconv.runtime.onnxruntime.time_limit import LimitedSession, TimeLimit


def why_not_opened(model: onnx.ModelProto, settings: SessionSettings) -> str:
    """Why onnxruntime refuses a graph; empty if it opens it.

    Args:
        model: the graph; its stored weights become inputs of a copy.
        settings: of onnxruntime; nothing is optimized.
    """
    copy = onnx.ModelProto.FromString(model.SerializeToString())
    stored = [tensor for tensor in copy.graph.initializer if is_external(tensor)]
    ports = [onnx.helper.make_tensor_value_info(t.name, t.data_type, list(t.dims)) for t in stored]
    kept = [tensor for tensor in copy.graph.initializer if not is_external(tensor)]
    del copy.graph.initializer[:]
    copy.graph.initializer.extend(kept)
    copy.graph.input.extend(ports)
    options = replace(settings, optimization="disable", change=None, packed_cache=None).options()
    try:
        LimitedSession(copy.SerializeToString(), options, ["CPUExecutionProvider"], TimeLimit(0, settings.timeout))
    except Exception as error:  # onnxruntime's exceptions share no base class of their own
        raise_if_out_of_memory(error, "while a graph was opened")
        return first_line(error)
    return ""
