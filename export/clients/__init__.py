"""What each client wants beside the graphs: one file per client in this folder, found by listing it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import onnx

from llmconv.errors import UnsupportedInput, UsageProblem
from llmconv.export.input_maps import InputMap, Port
from llmconv.files.safe_folder import Link
from llmconv.plugins import plugins

ROLES = ("prefill", "decode", "unified")
DEFAULT = "onnxruntime"


Content = bytes | Link


@dataclass(frozen=True)
class Model:
    """What a layout may know of the model.

    Attributes:
        config: of transformers.
        input_map: the row of its `model_type`.
        generation: the content of `generation_config.json`, None where there is none.
        cache: `growing`, or `shared-buffer`.
    """

    config: Any
    input_map: InputMap
    generation: Mapping[str, Any] | None = None
    cache: str = "growing"


@dataclass(frozen=True)
class Graphs:
    """The graphs of one export, bound to their weights.

    Attributes:
        encoded: role (`prefill`, `decode`, `unified`) to the bytes of its file.
        files: role to the name of its file.
        weights: names of the files that the weights lie in, beside the graphs.
    """

    encoded: Mapping[str, bytes]
    files: Mapping[str, str]
    weights: tuple[str, ...]

    def past(self) -> list[Port]:
        """The cache's inputs of keys and values, with the axes that the model was found to have."""
        graph = onnx.load_from_string(next(iter(self.encoded.values()))).graph
        return [
            Port(port.name, "", tuple(dim.dim_param or dim.dim_value for dim in port.type.tensor_type.shape.dim))
            for port in graph.input
            if port.name.startswith("past_key_values.")
        ]


def _nothing(*_: Any) -> dict[str, Any]:
    return {}


def _no_problem(_: Model) -> None:
    return None


@dataclass(frozen=True)
class Layout:
    """One client; each file of this folder has one as its constant `LAYOUT`.

    Attributes:
        name: what `--layout` takes, equal to the file's name.
        title: one line for people.
        roles: the graphs that are written where none was asked for.
        serves: sets of graphs that the client can run, the best first; with any others it can do nothing.
        adds: whether the best of them is added then to what was asked for; otherwise that contradicts the layout.
        caches: the kinds of cache that it can keep.
        check: raises InputRefused for a model that the client cannot run.
        names: the files that `files` will give, apart from the graphs themselves.
        files: their content, and that of graphs which the client needs otherwise, by path in the folder.
        config: fields of `config.json` where the folder is a new one; a model folder's own file stays as it is.
    """

    name: str
    title: str
    roles: tuple[str, ...]
    serves: tuple[frozenset[str], ...] = ()
    adds: bool = False
    caches: tuple[str, ...] = ("growing",)
    check: Callable[[Model], None] = _no_problem
    names: tuple[str, ...] = ()
    files: Callable[[Model, Graphs], Mapping[str, Content]] = _nothing
    config: Callable[[Model, Graphs], Mapping[str, Any]] = _nothing


@lru_cache(maxsize=1)
def layouts() -> dict[str, Layout]:
    """Every layout by name, in alphabetical order."""
    return plugins(__name__, "LAYOUT", Layout)


def by_names(names: Sequence[str]) -> list[Layout]:
    """The layouts called so, each once; the default one when none is named.

    Raises:
        UsageProblem: there is none of that name.
    """
    for name in names:
        if name not in layouts():
            raise UsageProblem(f"there is no layout `{name}`", hint=f"one of: {', '.join(layouts())}")
    return [layouts()[name] for name in dict.fromkeys(names or (DEFAULT,))]


def roles_for(chosen: Sequence[Layout], asked: Sequence[str]) -> list[str]:
    """The graphs to write, in the order of `ROLES`.

    Args:
        chosen: the layouts.
        asked: the graphs asked for; none asks for what the layouts want.

    Raises:
        UsageProblem: a client can do nothing with the graphs asked for.
    """
    wanted = set(asked) or {role for layout in chosen for role in layout.roles}
    for layout in chosen:
        if layout.serves and not any(graphs <= wanted for graphs in layout.serves):
            if not layout.adds:
                raise UsageProblem(
                    f"layout `{layout.name}` can do nothing with the {sorted(wanted)[0]} graph alone",
                    hint="give `--unified`, or `--prefill --incremental`, or none of them",
                )
            wanted |= layout.serves[0]
    return [role for role in ROLES if role in wanted]


@dataclass(frozen=True)
class Dressing:
    """The chosen layouts for one model: what to write beside its graphs."""

    chosen: Sequence[Layout]
    model: Model

    @property
    def names(self) -> tuple[str, ...]:
        """The files that will be added."""
        return tuple(name for layout in self.chosen for name in layout.names)

    def check(self, odd: str, cache: str, *, takes_embeddings: bool) -> None:
        """Whether the clients can run the graphs.

        Args:
            odd: an option that only llmconv's own runner understands; empty for none.
            cache: of the graphs.
            takes_embeddings: the graphs take no tokens.

        Raises:
            UsageProblem: one cannot, because of an option.
            InputRefused: one cannot run this model.
        """
        for layout in self.chosen:
            if layout.name == DEFAULT:
                continue
            reason = odd or (f"a {cache} cache" if cache not in layout.caches else "")
            if reason:
                raise UsageProblem(
                    f"layout `{layout.name}` can do nothing with `{reason}`", hint="leave out the one or the other"
                )
            if takes_embeddings:
                raise UnsupportedInput(
                    f"layout `{layout.name}` wants what makes features of images too, which is not exported",
                    hint=f"leave out `--layout {layout.name}`",
                )
            layout.check(self.model)

    def files(self, graphs: Graphs) -> dict[str, Content]:
        """All files by path in the folder, the graphs first; a layout's graph replaces the plain one."""
        contents: dict[str, Content] = {graphs.files[role]: graphs.encoded[role] for role in graphs.encoded}
        for layout in self.chosen:
            contents.update(layout.files(self.model, graphs))
        return contents

    def config(self, graphs: Graphs) -> dict[str, Any]:
        """Fields for the `config.json` of a new folder."""
        return {name: value for layout in self.chosen for name, value in layout.config(self.model, graphs).items()}
