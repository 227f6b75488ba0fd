"""SessionChain: the sessions of a graph in stages, with the interface of one session."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort

from llmconv.errors import LlmconvError, MalformedInput, first_line
from llmconv.memory import raise_if_out_of_memory
from llmconv.runtime.cache_names import is_past, is_present
from llmconv.runtime.onnxruntime.guard import load_guarded, nodes, weight_bytes
from llmconv.runtime.onnxruntime.lora_names import is_factor
from llmconv.runtime.onnxruntime.packed_cache import (
    discard,
    is_packed,
    join_projections,
    open_changed,
    open_kept,
    open_packed,
    packed_graph,
)
from llmconv.runtime.onnxruntime.session_settings import HOST, Device, SessionSettings
from llmconv.runtime.onnxruntime.time_limit import TOO_LONG, LimitedSession, TimeLimit


class SessionChain:
    """The sessions of a graph's stages, in order; one session for a graph in one file.

    `op_types` are the graph's operators; with `joins` and `settings.prepack`, projections are joined before they are
    packed. Raises MalformedInput if `guard` or onnxruntime refuses a file, UsageProblem for settings of a stage that
    does not exist.
    """

    def __init__(self, paths: Sequence[Path], settings: SessionSettings, *, joins: bool = True) -> None:
        settings.require_stages(len(paths))
        every = [settings.of_stage(number) for number in range(1, len(paths) + 1)]
        models = [load_guarded(path) for path in paths]
        limits = [TimeLimit(weight_bytes(model), settings.timeout) for model in models]
        opened = zip(paths, models, every, limits, strict=True)
        self._devices = [one.device for one in every]
        self._sessions = [_open(path, model, own, limit, joins) for path, model, own, limit in opened]
        self.op_types = {node.op_type for model in models for node in nodes(model)}
        self._results = self.get_outputs()
        self._names = [  # onnxruntime builds these lists anew for every request
            ([arg.name for arg in session.get_inputs()], [arg.name for arg in session.get_outputs()])
            for session in self._sessions
        ]
        self._defaults = [[arg.name for arg in session.get_overridable_initializers()] for session in self._sessions]

    @property
    def last(self) -> LimitedSession:
        """The last session, the only one of a graph in one file."""
        return self._sessions[-1]

    def device_of(self, name: str) -> Device:
        """The device of the first session that reads the input `name`."""
        found = (device for device, (inputs, _) in zip(self._devices, self._names, strict=True) if name in inputs)
        return next(found, self._devices[0])

    def get_inputs(self) -> list[Any]:
        """The declared inputs that no earlier session computes, each once: the cache last."""
        produced: set[str] = set()
        inputs: dict[str, Any] = {}
        for session in self._sessions:
            inputs.update(
                {arg.name: inputs.get(arg.name, arg) for arg in session.get_inputs() if arg.name not in produced}
            )
            produced |= {arg.name for arg in session.get_outputs()}
        return sorted(inputs.values(), key=lambda arg: is_past(arg.name))

    def get_outputs(self) -> list[Any]:
        """The declared outputs that no session reads: the results first, then the cache."""
        read = {arg.name for session in self._sessions for arg in session.get_inputs()}
        outputs = [arg for session in self._sessions for arg in session.get_outputs() if arg.name not in read]
        return sorted(outputs, key=lambda arg: arg.name.startswith("present"))

    def get_factors(self) -> list[Any]:
        """The declared inputs for LoRA factors, which have a default."""
        optional = (arg for session in self._sessions for arg in session.get_overridable_initializers())
        return [arg for arg in optional if is_factor(arg.name)]

    def run_with_ort_values(self, names: Sequence[str], feeds: Mapping[str, ort.OrtValue]) -> list[ort.OrtValue]:
        """The values of the outputs `names` of any session; `feeds` are all inputs by name, factors optional.

        The results lie in the host's memory; the cache stays on the device of its stage, and so does what one session
        passes to the next if all have the same device.
        """
        values = dict(feeds)
        every = zip(self._sessions, self._devices, self._names, self._defaults, strict=True)
        for session, device, (inputs, outputs), defaults in every:
            feeds = {name: values[name] for name in (*inputs, *(name for name in defaults if name in values))}
            made = (
                session.run_with_ort_values(outputs, feeds)
                if device.memory == HOST
                else session.run_on_device(self._places(outputs, device), feeds, device.index)
            )
            values.update(zip(outputs, made, strict=True))
        return [values[name] for name in names]

    def _places(self, outputs: Sequence[str], device: Device) -> dict[str, str]:
        """The memory of each output."""
        results = {arg.name for arg in self._results if not is_present(arg.name)}
        passed = len(set(self._devices)) > 1  # through the host
        return {
            name: HOST if name in results or (passed and not is_present(name)) else device.memory for name in outputs
        }


def _open(
    path: Path, model: onnx.ModelProto, settings: SessionSettings, limit: TimeLimit, joins: bool
) -> LimitedSession:
    joins = joins and (settings.prepack or settings.packed_cache is not None)
    if settings.packed_cache or is_packed(model):
        settings = replace(settings, prepack=True)
    settings.start()
    try:
        return _session(path, model, settings, limit, joins)
    except LlmconvError:
        raise
    except TimeoutError as error:
        raise MalformedInput(f"`{path.name}` cannot be opened: {error}", hint=TOO_LONG) from error
    except Exception as error:  # onnxruntime's exceptions share no base class of their own
        raise_if_out_of_memory(error, f"while `{path.name}` was opened")
        raise MalformedInput(
            f"onnxruntime cannot open `{path.name}`: {first_line(error)}", hint="run `llmconv export` again"
        ) from error


def _session(
    path: Path, model: onnx.ModelProto, settings: SessionSettings, limit: TimeLimit, joins: bool
) -> LimitedSession:
    options, providers = settings.options(), settings.providers()
    changed = settings.prepare(path, model, options)
    if joins and options.graph_optimization_level != ort.GraphOptimizationLevel.ORT_DISABLE_ALL:
        join_projections(model.graph)  # onnxruntime joins the matrices when it folds constants
    if settings.packed_cache and (packed := packed_graph(path, model, settings, limit)):
        try:
            return open_kept(packed, settings, limit)
        except Exception:  # a damaged file; onnxruntime's exceptions share no base class of their own
            discard(packed)
    if joins:
        return open_packed(path, model, options, providers, limit)
    if changed:
        return open_changed(path, model, options, providers, limit)
    return LimitedSession(path, options, providers, limit)
