"""A source file of the installed transformers, its classes defined with stand-ins for what they import.

Only constructors and what they call are kept, and only of the classes that are asked for; torch is not imported. What
runs is the library that the model will be loaded with: nothing of a checkpoint.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import importlib
import importlib.util
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from llmconv.convert.models.blueprint.config import ConfigStandIn
from llmconv.convert.models.blueprint.torch_stand_ins import Module, Nn, Plain, Torch
from llmconv.convert.models.blueprint.unknown import Unknown

STANDARD = ("math", "copy", "functools", "itertools", "collections", "dataclasses", "typing", "re", "enum", "numbers")
LIBRARY_FILES = ("activations", "pytorch_utils")
"""transformers' own modules that hold weights and are small enough to read."""

CONSTRUCTORS = ("__init__", "__post_init__")
LEFT_OUT = ("forward", "reset_parameters", "init_weights", "_init_weights", "post_init")
DECORATORS = ("property", "staticmethod", "classmethod", "cached_property", "setter")


class PreTrainedModel(Module):
    """transformers' base of all models."""

    base_model_prefix = ""
    _tied_weights_keys: Any = None
    _keys_to_ignore_on_load_unexpected: Any = None

    def __init__(self, config: Any = None, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.config = config

    @classmethod
    def _from_config(cls, config: Any, **kwargs: Any) -> Any:
        return cls(config)


STAND_INS: dict[str, Any] = {
    "PreTrainedModel": PreTrainedModel,
    "PreTrainedConfig": ConfigStandIn,
    "PretrainedConfig": ConfigStandIn,
    "GradientCheckpointingLayer": Module,
    "GenerationMixin": object,
    "EmbeddingAccessMixin": object,
    "BackboneMixin": object,
    "nn": Nn(),
    "torch": Torch(),
}


USUAL_LAYERS = {"full_attention", "sliding_attention", "linear_attention", "chunked_attention"}


def remap_layer_types(layer_types: Any = None, config: Any = None) -> Any:
    """What the installed transformers calls kinds of layers today; older files say `mamba` and `attention`.

    Args:
        layer_types: a list of kinds, for which the new list is returned; or
        config: a configuration, whose `layer_types` are replaced.
    """
    kinds = config.layer_types if config is not None and hasattr(config, "layer_types") else layer_types
    root = transformers_folder()
    if not isinstance(kinds, list) or set(kinds) <= USUAL_LAYERS or root is None:
        return kinds
    table = source(root / "configuration_utils.py")["_LEGACY_LAYER_TYPE_REMAP"]
    new = [table.get(kind, kind) for kind in kinds] if isinstance(table, dict) else kinds
    if config is not None and new != kinds:
        config.layer_types = new
    return new


STAND_INS |= {"remap_legacy_layer_types": remap_layer_types, "resolve_internal_import": lambda *args, **kwargs: None}


def transformers_folder() -> Path | None:
    """Where the installed transformers lies."""
    spec = importlib.util.find_spec("transformers")
    return Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None


@lru_cache(maxsize=16)
def source(path: Path) -> SourceFile:
    """The source file `path`, read once."""
    return SourceFile(path)


class SourceFile:
    """The names of one source file, each defined when it is first asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tree = ast.parse(path.read_bytes(), str(path)) if path.is_file() else ast.Module([], [])
        self._nodes: dict[str, ast.stmt] = {}
        self._imports: dict[str, tuple[ast.Import | ast.ImportFrom, str]] = {}
        for node in self.tree.body:
            self._note(node)
        self._wanted = _called_by_constructors(self.tree)
        self._names: dict[str, Any] = {"__name__": path.stem, "__builtins__": builtins}

    def _note(self, node: ast.stmt) -> None:
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                self._nodes[name] = node
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                self._nodes[name] = node
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                self._imports |= {(one.asname or one.name).partition(".")[0]: (node, one.name) for one in names}

    @property
    def classes(self) -> dict[str, list[ast.stmt]]:
        """Class name to the statements of its body."""
        return {name: node.body for name, node in self._nodes.items() if isinstance(node, ast.ClassDef)}

    def __getitem__(self, name: str) -> Any:
        """What `name` stands for; Unknown where it cannot be defined."""
        if name in self._names:
            return self._names[name]
        self._names[name] = Unknown(name)  # until it is known; also ends circles
        if "RotaryEmbedding" in name:
            self._names[name] = Plain
        elif name in self._nodes:
            self._define(name, self._nodes[name])
        else:
            self._names[name] = self._imported(name)
        return self._names[name]

    def _define(self, name: str, node: ast.stmt) -> None:
        if isinstance(node, ast.ClassDef):
            _strip_class(node, self._wanted)
        elif isinstance(node, ast.FunctionDef):
            node.decorator_list = []
        for used in sorted({one.id for one in ast.walk(node) if isinstance(one, ast.Name)}):
            if used != name and (used in self._nodes or used in self._imports):
                self[used]
        flags = __future__.annotations.compiler_flag
        code = compile(
            ast.fix_missing_locations(ast.Module([node], [])), str(self.path), "exec", flags=flags, dont_inherit=True
        )
        try:
            exec(code, self._names)
        except Exception:
            self._names[name] = False if name.startswith("is_") else Unknown(name)

    def _imported(self, name: str) -> Any:
        node, original = self._imports.get(name, (None, name))
        if original in STAND_INS:
            return STAND_INS[original]
        if original.startswith("is_"):
            return lambda *args, **kwargs: False
        module = (node.module or "") if isinstance(node, ast.ImportFrom) else original
        level = node.level if isinstance(node, ast.ImportFrom) else 0
        if not level and module.partition(".")[0] in STANDARD:
            found = importlib.import_module(module)
            return getattr(found, original, Unknown(name)) if isinstance(node, ast.ImportFrom) else found
        if not level and module.startswith("torch.nn"):
            return getattr(Nn(), original) if isinstance(node, ast.ImportFrom) else STAND_INS["nn"]
        file = self._relative(level, module)
        return source(file)[original] if file else Unknown(original)

    def _relative(self, level: int, module: str) -> Path | None:
        """The file that is meant by a relative import, where it is one to be read."""
        root = transformers_folder()
        if not level or root is None:
            return None
        file = self.path.parents[level - 1].joinpath(*module.split(".")).with_suffix(".py")
        is_model = file.stem.startswith(("modeling_", "configuration_")) and file.parent.parent == root / "models"
        is_read = is_model or (file.parent == root and file.stem in LIBRARY_FILES)
        return file if is_read and file.is_file() and file.parent.name != "auto" else None


def _called_by_constructors(tree: ast.Module) -> set[str]:
    """Names of attributes that constructors use, and of those that the methods of these names use."""
    methods = [node for one in tree.body if isinstance(one, ast.ClassDef) for node in one.body]
    functions = [node for node in methods if isinstance(node, ast.FunctionDef)]
    used: dict[str, set[str]] = {}
    for function in functions:
        found = {node.attr for node in ast.walk(function) if isinstance(node, ast.Attribute)}
        used[function.name] = used.get(function.name, set()) | found
    wanted: set[str] = set()
    waiting = [*CONSTRUCTORS]
    while waiting:
        name = waiting.pop()
        if name not in wanted and name not in LEFT_OUT:
            wanted.add(name)
            waiting += used.get(name, ())
    return wanted


def _strip_class(node: ast.ClassDef, wanted: set[str]) -> None:
    """Leaves out methods that build nothing, and decorators that need transformers."""
    node.decorator_list = []
    kept = [one for one in node.body if not isinstance(one, ast.FunctionDef) or one.name in wanted or _is_property(one)]
    node.body = kept or [ast.Pass()]
    for function in node.body:
        if isinstance(function, ast.FunctionDef):
            function.decorator_list = [one for one in function.decorator_list if _last_name(one) in DECORATORS]


def _is_property(node: ast.FunctionDef) -> bool:
    return any(_last_name(one) in DECORATORS for one in node.decorator_list)


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def assigned(body: list[ast.stmt], field: str) -> Iterator[ast.expr]:
    """The values that statements of a class give `field`."""
    for node in body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if name == field:
                yield value
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value) if name == field:
                yield value
