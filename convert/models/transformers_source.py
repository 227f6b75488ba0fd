"""The source of the installed transformers, read without importing torch: classes with stand-ins, and names of models.

Only constructors and what they call are kept, and only of the classes that are asked for. Only code of the library that
the model will be loaded with runs, and nothing of a checkpoint. PreTrainedConfig (`configuration_utils.py`) has a
stand-in with default fields, other names for them, and `__post_init__`.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import copy
import dataclasses
import importlib
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from llmconv.checkpoint import HEADS
from llmconv.convert.models.torch_stand_ins import Module, Nn, Plain, Torch, Unknown

LARGEST = 1 << 24  # no size of a model is larger; a list of that many items would still be built in a moment
CLASS_FIELDS = ("attribute_map", "sub_configs", "sub_configs_defaults", "model_type")
HOOKS = ("validate", "convert", "standardize", "remap", "_validate", "_convert")


class ConfigStandIn:
    """A configuration, without the checks of rotary settings, on which no shape depends."""

    attribute_map: dict[str, str] = {}
    is_encoder_decoder = False
    add_cross_attention = False
    chunk_size_feed_forward = 0
    output_attentions = False
    output_hidden_states = False
    use_cache = True
    return_dict = True
    num_labels = 2
    id2label = None
    label2id = None
    dtype = None
    default_theta = 10_000.0
    pruned_heads: dict[Any, Any] = {}
    _attn_implementation = "eager"
    _experts_implementation = "eager"
    _name_or_path = ""

    def __init__(self, **given: Any) -> None:
        fields = self._fields()
        for name, default in fields.items():
            setattr(self, name, copy.deepcopy(given.get(name, default)))
        self.__post_init__(**{name: value for name, value in given.items() if name not in fields})

    def __post_init__(self, **rest: Any) -> None:
        if hasattr(self, "rope_parameters"):
            rest = self.convert_rope_params_to_dict(**rest)
        for name, value in rest.items():
            if not isinstance(getattr(type(self), name, None), property):
                setattr(self, name, value)

    def convert_rope_params_to_dict(self, **rest: Any) -> dict[str, Any]:
        """Rotary settings as one dict under their name of today; source: transformers `modeling_rope_utils.py`."""
        found = rest.pop("rope_scaling", None) or getattr(self, "rope_parameters", None) or {}
        usual = {
            "rope_theta": rest.pop("rope_theta", getattr(self, "rope_theta", self.default_theta)),
            "partial_rotary_factor": rest.pop("partial_rotary_factor", getattr(self, "partial_rotary_factor", None)),
            "rope_type": "default",
        }
        usual = {name: value for name, value in usual.items() if value is not None}
        nested = [name for name in found if isinstance(found[name], dict)]
        merged = {name: {**usual, **found[name]} for name in nested} if nested else {**usual, **found}
        object.__setattr__(self, "rope_parameters", merged)
        return rest

    @classmethod
    def _fields(cls) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        for base in reversed(cls.__mro__[: cls.__mro__.index(ConfigStandIn)]):
            own = base.__dict__
            for name in own.get("__annotations__", {}):
                if name in own and name not in CLASS_FIELDS and "ClassVar" not in str(own["__annotations__"][name]):
                    value = own[name]
                    if isinstance(value, dataclasses.Field):
                        factory = value.default_factory
                        value = value.default if factory is dataclasses.MISSING else factory()
                    fields[name] = value
        return fields

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, type(self).attribute_map.get(name, name), value)

    def __getattribute__(self, name: str) -> Any:
        other = object.__getattribute__(self, "attribute_map")
        return object.__getattribute__(self, other.get(name, name))

    def __getattr__(self, name: str) -> Any:
        if name.startswith(HOOKS):
            return lambda *args, **kwargs: kwargs
        raise AttributeError(name)

    def get_text_config(self, **kwargs: Any) -> ConfigStandIn:
        """As in transformers; a stand-in has no inner configurations."""
        return self


def bounded(value: Any) -> Any:
    """A value with no number above `LARGEST`, so that building ends, but for `vocab_size`, which messages show."""
    if isinstance(value, dict):
        return {name: item if name == "vocab_size" else bounded(item) for name, item in value.items()}
    if isinstance(value, list):
        return [bounded(item) for item in value]
    return max(-LARGEST, min(LARGEST, value)) if type(value) is int else value


STANDARD = ("math", "copy", "functools", "itertools", "collections", "dataclasses", "typing", "re", "enum", "numbers")
# transformers' own modules that hold weights and are small enough to read
LIBRARY_FILES = ("activations", "pytorch_utils")
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


USUAL_LAYERS = {"full_attention", "sliding_attention", "linear_attention", "chunked_attention"}


def remap_layer_types(layer_types: Any = None, config: Any = None) -> Any:
    """Layer kinds by today's names (once `mamba`, `attention`): the new list, or replaced in `config`."""
    kinds = config.layer_types if config is not None and hasattr(config, "layer_types") else layer_types
    root = transformers_folder()
    if not isinstance(kinds, list) or set(kinds) <= USUAL_LAYERS or root is None:
        return kinds
    table = source(root / "configuration_utils.py")["_LEGACY_LAYER_TYPE_REMAP"]
    new = [table.get(kind, kind) for kind in kinds] if isinstance(table, dict) else kinds
    if config is not None and new != kinds:
        config.layer_types = new
    return new


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
    "remap_legacy_layer_types": remap_layer_types,
    "resolve_internal_import": lambda *args, **kwargs: None,
}


def transformers_folder() -> Path | None:
    """Where the installed transformers lies."""
    spec = importlib.util.find_spec("transformers")
    return Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None


@lru_cache(maxsize=16)
def source(path: Path) -> SourceFile:
    return SourceFile(path)


class SourceFile:
    """The names of one source file, each defined when it is first asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tree = ast.parse(path.read_bytes(), str(path)) if path.is_file() else ast.Module([], [])
        self._nodes: dict[str, ast.stmt] = {}
        self._imports: dict[str, tuple[ast.Import | ast.ImportFrom, str]] = {}
        for node in self.tree.body:
            match node:
                case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                    self._nodes[name] = node
                case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                    self._nodes[name] = node
                case ast.Import(names=names) | ast.ImportFrom(names=names):
                    self._imports |= {(one.asname or one.name).partition(".")[0]: (node, one.name) for one in names}
        # names of attributes that constructors use, and of those that the methods of these names use
        methods = [node for one in self.tree.body if isinstance(one, ast.ClassDef) for node in one.body]
        functions = [node for node in methods if isinstance(node, ast.FunctionDef)]
        used: dict[str, set[str]] = {}
        for function in functions:
            found = {node.attr for node in ast.walk(function) if isinstance(node, ast.Attribute)}
            used[function.name] = used.get(function.name, set()) | found
        wanted: set[str] = set()
        waiting = ["__init__", "__post_init__"]
        while waiting:
            name = waiting.pop()
            if name not in wanted and name not in LEFT_OUT:
                wanted.add(name)
                waiting += used.get(name, ())
        self._wanted = wanted
        self._names: dict[str, Any] = {"__name__": path.stem, "__builtins__": builtins}

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


def _strip_class(node: ast.ClassDef, wanted: set[str]) -> None:
    """Leaves out methods that build nothing, and decorators that need transformers."""
    node.decorator_list = []
    kept = [
        one
        for one in node.body
        if not isinstance(one, ast.FunctionDef)
        or one.name in wanted
        or any(_last_name(decorator) in DECORATORS for decorator in one.decorator_list)
    ]
    node.body = kept or [ast.Pass()]
    for function in node.body:
        if isinstance(function, ast.FunctionDef):
            function.decorator_list = [one for one in function.decorator_list if _last_name(one) in DECORATORS]


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


TABLE = "MODEL_FOR_{}_MAPPING_NAMES"


def causal_lm_classes() -> dict[str, str]:
    """`model_type` to class name, such as `gpt2` to `GPT2LMHeadModel`; empty where transformers keeps it elsewhere."""
    return auto_classes("CAUSAL_LM")


@lru_cache(maxsize=8)
def auto_classes(task: str) -> dict[str, str]:
    """`model_type` to the class that transformers loads for a task; empty where it keeps the table elsewhere.

    Source: `TABLE` in transformers `models/auto/modeling_auto.py`, the tables behind AutoModelForCausalLM and others.
    Importing it would load torch, so the source is parsed. `task` is as in the name of the table, such as `CAUSAL_LM`.
    """
    root = transformers_folder()
    for node in source(root / "models" / "auto" / "modeling_auto.py").tree.body if root else ():
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(args=[rows])) if name == TABLE.format(task):
                return {kind: name for kind, name in ast.literal_eval(rows) if isinstance(name, str)}
    return {}


FOLDER_NAME = re.compile(r"[A-Za-z0-9_.]{1,100}", re.ASCII)
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")


@dataclass(frozen=True)
class ModelNames:
    """Names of a causal language model's parts; empty if the source of transformers does not contain them."""

    base: str  # the attribute that holds the model without its head, such as `model` or `transformer`
    embedding: str = ""
    head: str = ""
    tied: bool | None = None  # default for whether the head is the embedding; None if unknown

    @property
    def roots(self) -> tuple[str, ...]:
        """What the names of a whole model, with MTP heads, begin with; heads had other names in older versions."""
        names = (self.base, self.head, *HEADS, "mtp")
        return tuple(dict.fromkeys(f"{name.partition('.')[0]}." for name in names if name))


@lru_cache(maxsize=8)
def model_names(model_type: str) -> ModelNames:
    """The names for `model_type`; `model` alone where the source of the installed transformers does not contain them.

    Source: `base_model_prefix` and `_tied_weights_keys` in transformers `models/*/modeling_*.py`, and the default of
    `tie_word_embeddings` in `configuration_*.py`.
    """
    folder = model_folder(model_type)
    modeling = source(folder / f"modeling_{folder.name}.py").classes if folder else {}
    causal = modeling.get(causal_lm_classes().get(model_type, ""))
    bases = [found for body in modeling.values() if isinstance(found := _value(body, "base_model_prefix"), str)]
    pairs = _value(causal, "_tied_weights_keys") if causal else None
    head, embedding = next(iter(pairs.items())) if isinstance(pairs, dict) and pairs else ("", "")
    base = next((name for name in bases if name and embedding.startswith(f"{name}.")), bases[0] if bases else "model")
    return ModelNames(base, embedding, head, _tied(folder, model_type) if folder else None)


def _tied(folder: Path, model_type: str) -> bool | None:
    for body in source(folder / f"configuration_{folder.name}.py").classes.values():
        if _value(body, "model_type") == model_type:
            found = _value(body, "tie_word_embeddings")
            return found if isinstance(found, bool) else None
    return None


def model_folder(model_type: str) -> Path | None:
    """Where transformers keeps the source of a model type."""
    root, name = transformers_folder(), model_type.replace("-", "_")
    if not FOLDER_NAME.fullmatch(name):
        return None
    folders = [root / "models" / one for one in (name, name.removesuffix("_text"))] if root else []
    return next((folder for folder in folders if folder.is_dir()), None)


def _value(body: list[ast.stmt], field: str) -> Any:
    """The literal that a class gives `field`, or None."""
    for value in assigned(body, field):
        try:
            return ast.literal_eval(value)
        except ValueError:
            return None
    return None
