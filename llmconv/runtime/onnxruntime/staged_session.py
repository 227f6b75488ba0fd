"""Several sessions that hand values on by name, in the shape of one: a graph in stages runs like a whole one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort

from llmconv.errors import MalformedInput, first_line
from llmconv.memory import raise_if_out_of_memory
from llmconv.runtime.onnxruntime.guard import load_guarded, nodes, weight_bytes
from llmconv.runtime.onnxruntime.prepacked import open_changed, open_packed
from llmconv.runtime.onnxruntime.session_settings import CPU, Change
from llmconv.runtime.onnxruntime.time_limit import TOO_LONG, LimitedSession, TimeLimit


class SessionChain:
    """The sessions of a graph's files, in order; one for a graph that is whole.

    Attributes:
        op_types: operators that occur in it.

    Args:
        paths: the files.
        options: of every session.
        providers: what runs their operators, best first.
        packed: they pack their weights.
        change: see `SessionSettings`.
        seconds: that opening it, and every run, may take at the least; None for the usual.

    Raises:
        MalformedInput: the guard or onnxruntime refuses a file.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        options: ort.SessionOptions,
        providers: Sequence[Any] = (CPU,),
        packed: bool = False,
        change: Change | None = None,
        seconds: float | None = None,
    ) -> None:
        models = [load_guarded(path) for path in paths]
        limits = [TimeLimit(weight_bytes(model), seconds) for model in models]
        if change:
            for path, model in zip(paths, models, strict=True):
                change(path, model)
        self.op_types = {node.op_type for model in models for node in nodes(model)}
        self._sessions = [
            _open(path, model if packed or change else None, options, providers, packed, limit)
            for path, model, limit in zip(paths, models, limits, strict=True)
        ]
        self._ports = [  # onnxruntime makes these lists anew for whoever asks
            ([arg.name for arg in session.get_inputs()], [arg.name for arg in session.get_outputs()])
            for session in self._sessions
        ]

    @property
    def whole(self) -> LimitedSession:
        """The last session, which is the only one of a graph that is whole."""
        return self._sessions[-1]

    def get_inputs(self) -> list[Any]:
        """What must be fed: inputs that no earlier session makes, each once, as onnxruntime declares them."""
        made: set[str] = set()
        fed: dict[str, Any] = {}
        for session in self._sessions:
            fed.update({arg.name: fed.get(arg.name, arg) for arg in session.get_inputs() if arg.name not in made})
            made |= {arg.name for arg in session.get_outputs()}
        return list(fed.values())

    def get_outputs(self) -> list[Any]:
        """What comes out: outputs that no session takes; the last session's results first, then those of the others."""
        taken = {arg.name for session in self._sessions for arg in session.get_inputs()}
        given = [arg for session in self._sessions for arg in session.get_outputs() if arg.name not in taken]
        return sorted(given, key=lambda arg: arg.name.startswith("present"))

    def run_with_ort_values(self, names: Sequence[str], feeds: Mapping[str, ort.OrtValue]) -> list[ort.OrtValue]:
        """The values called `names`.

        Args:
            names: outputs of any session.
            feeds: every input that no session makes.
        """
        values = dict(feeds)
        for session, (inputs, outputs) in zip(self._sessions, self._ports, strict=True):
            taken = {name: values[name] for name in inputs}
            values.update(zip(outputs, session.run_with_ort_values(outputs, taken), strict=True))
        return [values[name] for name in names]


def _open(
    path: Path,
    model: onnx.ModelProto | None,
    options: ort.SessionOptions,
    providers: Sequence[Any],
    packed: bool,
    limit: TimeLimit,
) -> LimitedSession:
    try:
        if model:
            return (open_packed if packed else open_changed)(path, model, options, providers, limit)
        return LimitedSession(path, options, providers, limit)
    except TimeoutError as error:
        raise MalformedInput(f"`{path.name}` cannot be opened: {error}", hint=TOO_LONG) from error
    except Exception as error:  # onnxruntime's exceptions share no base class of their own
        raise_if_out_of_memory(error, f"while `{path.name}` was opened")
        raise MalformedInput(
            f"onnxruntime cannot open `{path.name}`: {first_line(error)}", hint="run `llmconv export` again"
        ) from error
