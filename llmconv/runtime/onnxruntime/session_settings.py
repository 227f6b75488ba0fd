"""SessionSettings: how onnxruntime opens a graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort

from llmconv.errors import UsageProblem, first_line

CPU = "CPUExecutionProvider"

GraphTransform = Callable[[Path, onnx.ModelProto], None]
"""Changes a graph without its weights; they stay in the files beside the path."""

LEVELS = {
    "all": "ORT_ENABLE_ALL",
    "layout": "ORT_ENABLE_LAYOUT",
    "extended": "ORT_ENABLE_EXTENDED",
    "basic": "ORT_ENABLE_BASIC",
    "disable": "ORT_DISABLE_ALL",
}


@dataclass(frozen=True)
class SessionSettings:
    """How onnxruntime opens a graph.

    Attributes:
        threads: threads per operator, 0 for one per core.
        prepack: copies weights into a layout of its own: prompts and steps are faster (docs/speed.md), but each
            session then holds the weights once more and two sessions no longer share the mapped file.
        optimization: `all`, `layout`, `extended`, `basic` or `disable`.
        garbage: buffers of a fixed length start with large numbers in place of zeros, for `verify`.
        arena: keeps memory that was freed, for the next call.
        reuse: writes values where others lay that are no longer read; onnxruntime 1.31 takes the past and the present
            of GroupQueryAttention for values of one size there.
        float_activations: dequantised weights meet activations as they are; onnxruntime else rounds those to int8.
        yields: threads stop spinning when a run is over, so that those of another session find a core; for all sessions
            but the one that runs step after step.
        provider: what runs the operators, such as `cpu` or `CUDAExecutionProvider`; the CPU takes what it cannot run.
        provider_options: of that provider, all text.
        entries: onnxruntime's session configuration, such as `session.intra_op.allow_spinning`, all text.
        attributes: fields of `onnxruntime.SessionOptions`; they go before the ones above.
        free_dimensions: symbols of the graph's axes, and the sizes they are fixed to.
        change: called with every graph's path and content before it is opened, and may change the content.
        timeout: seconds that opening a graph, and every run of it, may take at the least (larger models and longer
            prompts may take more, see `time_limit`); None for 60.
    """

    threads: int = 0
    prepack: bool = False
    optimization: str = "all"
    garbage: bool = False
    arena: bool = True
    reuse: bool = True
    float_activations: bool = False
    yields: bool = False
    provider: str = CPU
    provider_options: Mapping[str, str] = field(default_factory=dict)
    entries: Mapping[str, str] = field(default_factory=dict)
    attributes: Mapping[str, Any] = field(default_factory=dict)
    free_dimensions: Mapping[str, int] = field(default_factory=dict)
    change: GraphTransform | None = None
    timeout: float | None = None

    def options(self) -> ort.SessionOptions:
        """As onnxruntime's own object.

        Raises:
            UsageProblem: onnxruntime does not take one of the settings.
        """
        options = ort.SessionOptions()
        options.intra_op_num_threads = self.threads
        options.inter_op_num_threads = 1
        options.enable_cpu_mem_arena = self.arena
        options.enable_mem_reuse = self.reuse
        options.log_severity_level = 4  # failures are raised, so that they are told once
        options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, LEVELS[self.optimization])
        options.add_session_config_entry("session.disable_prepacking", "0" if self.prepack else "1")
        options.add_session_config_entry("session.force_spinning_stop", str(int(self.yields)))
        if self.float_activations:
            options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
        try:
            for name, value in self.attributes.items():
                setattr(options, name, value)
            for name, text in self.entries.items():
                options.add_session_config_entry(name, text)
            for symbol, size in self.free_dimensions.items():
                options.add_free_dimension_override_by_name(symbol, size)
        except Exception as error:  # onnxruntime's exceptions share no base class of their own
            raise UsageProblem(
                f"onnxruntime does not take a session option: {first_line(error)}", hint=NAMES
            ) from error
        return options

    def providers(self) -> list[Any]:
        """What runs operators, best first, as `InferenceSession` takes it.

        Raises:
            UsageProblem: this build of onnxruntime has no such provider.
        """
        name = provider_name(self.provider)
        return [(name, dict(self.provider_options))] + [CPU] * (name != CPU)


NAMES = "names and values are those of onnxruntime's `SessionOptions` and session configuration keys"


def provider_name(provider: str) -> str:
    """`cuda` or `CUDAExecutionProvider` in onnxruntime's own spelling.

    Raises:
        UsageProblem: this build of onnxruntime has no such provider.
    """
    available = ort.get_available_providers()
    spelled: dict[str, str] = {name.lower(): name for name in available}
    wanted = provider.lower().removesuffix("executionprovider")
    found = spelled.get(wanted + "executionprovider")
    if found is None:
        short = ", ".join(name.removesuffix("ExecutionProvider").lower() for name in available)
        raise UsageProblem(
            f"this onnxruntime has no provider `{provider}`",
            hint=f"it has {short}; other builds of onnxruntime (onnxruntime-gpu, onnxruntime-openvino, …) have others",
        )
    return found
