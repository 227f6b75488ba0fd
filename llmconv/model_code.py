"""The Python files of a model with code of its own, collected as data: nothing here imports or runs them.

    "auto_map": {"AutoConfig": "configuration_x.XConfig", "AutoModelForCausalLM": "modeling_x.XForCausalLM"}

They are the modules that `auto_map` names in `config.json` and `tokenizer_config.json`, and those that these import
relatively, at any depth; the source is parsed for that. Source of the format: transformers `dynamic_module_utils.py`.
"""

from __future__ import annotations

import ast
import re
import warnings
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmconv.checkpoint import Checkpoint, own_file, parse_object, read_small
from llmconv.errors import MalformedInput, first_line

AUTO_MAP, TOKENIZER_CONFIG = "auto_map", "tokenizer_config.json"
CONFIG_CLASS, TOKENIZER_CLASS = "AutoConfig", "AutoTokenizer"
# the keys under which a language model's class is found, best first; ChatGLM-6B has only the last two
MODEL_CLASSES = ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModel")
# suffixes of classes with an output head; `AutoModel` often names a class without
WITH_HEAD = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")
REFERENCE = re.compile(r"(?P<module>[^\W\d]\w*(\.[^\W\d]\w*)*)\.(?P<name>[^\W\d]\w*)")
REPOSITORY = "--"  # separates a Hub repository from a class in it: `org/name--module.Class`
# largest file, bytes and number of all files; transformers' own largest module has 0.3 MB, its syntax tree 30 MB
FILE_BYTES, ALL_BYTES, FILES = 1 << 19, 4 << 20, 200
NAME_BYTES, DEPTH = 200, 10  # longest name of a module, and deepest package
Module = tuple[str, ...]  # a dotted name, relative to the model's folder


def auto_map(fields: Mapping[str, Any]) -> dict[str, str]:
    """The classes that `auto_map` names, by transformers' auto class; of a pair of tokenizers the fast one."""
    found = fields.get(AUTO_MAP)
    found = {TOKENIZER_CLASS: found} if isinstance(found, list) else found  # transformers 4.20 wrote the pair alone
    named = found.items() if isinstance(found, Mapping) else ()
    last = {str(kind): [one for one in _listed(value) if isinstance(one, str)][-1:] for kind, value in named}
    return {kind: one[0] for kind, one in last.items() if one}


def model_class(fields: Mapping[str, Any]) -> str:
    """The reference to the class of the language model, such as `modeling_x.XForCausalLM`; empty if there is none."""
    named = auto_map(fields)
    headless = "AutoModel" in named and not named["AutoModel"].endswith(WITH_HEAD)
    kinds = MODEL_CLASSES[:-1] if headless else MODEL_CLASSES
    return next((named[kind] for kind in kinds if kind in named), "")


def references(*configs: Mapping[str, Any]) -> list[str]:
    """Every class that the `auto_map` of these configurations names, each once."""
    maps = [fields.get(AUTO_MAP) for fields in configs]
    values = [value for one in maps for value in (one.values() if isinstance(one, Mapping) else [one])]
    names = [name for value in values for name in _listed(value) if isinstance(name, str)]
    return list(dict.fromkeys(names))


def holds(folder: Path, names: Iterable[str]) -> bool:
    """Whether a folder has the module of every class, such as `modeling_x.XForCausalLM`."""
    found = [REFERENCE.fullmatch(name) for name in names]
    return all(one and _file_of(folder, tuple(one["module"].split("."))) for one in found)


def has_code(config: Mapping[str, Any], side_files: Mapping[str, bytes]) -> bool:
    """Whether the configuration of a model or its tokenizer refers to code."""
    return bool(references(config, _tokenizer_config(side_files)))


def code_of(folder: Path, config: Mapping[str, Any], side_files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The Python files of a model by relative path, empty if its configurations name none; raises as `collect_code`."""
    return collect_code(folder, references(config, _tokenizer_config(side_files)))


def collect_code(folder: Path, names: Iterable[str]) -> dict[str, bytes]:
    """The Python files of classes such as `modeling_x.XForCausalLM`, and of their relative imports, by relative path.

    Raises MalformedInput for a name in another repository or place, an import out of the folder, or a file that is
    missing, too large, a link out of the folder, or not Python.
    """
    files: dict[str, bytes] = {}
    pending = [_module_of(folder, name) for name in names]
    while pending:
        module = pending.pop()
        for part in range(1, len(module) + 1):
            name = _file_of(folder, module[:part])
            if not name or name in files:
                continue
            path = own_file(folder, name)
            if not path.parent.resolve().is_relative_to(folder.resolve()):
                problem = f"`{name}` in `{folder}` is behind a link that leads out of the folder"
                raise MalformedInput(problem, hint="replace it with a copy of the folder, if that belongs to the model")
            files[name] = read_small(path, FILE_BYTES)
            if len(files) > FILES or sum(map(len, files.values())) > ALL_BYTES:
                problem = f"the code in `{folder}` has more than {FILES} files, or {ALL_BYTES:,} bytes"
                raise MalformedInput(problem, hint="a model's code is a few files; copy it again")
            pending += _imported(folder, name, files[name])
    return dict(sorted(files.items()))


def missing_class(folder: Path, name: str) -> MalformedInput:
    """The error for a class of `auto_map` that is not in the folder, or in another repository."""
    repository, separated, rest = name.partition(REPOSITORY)
    if separated:
        return MalformedInput(
            f"`auto_map` names `{name[:80]}`, which is not in `{folder}` but in another repository",
            hint=f"nothing is downloaded; copy `{repository[:60]}`, read its code, and refer to it as `{rest[:60]}`",
        )
    hint = "copy the model's Python files next to `config.json`, and refer to them there as `module.Class`"
    return MalformedInput(f"`auto_map` names `{name[:80]}`, which is not in `{folder}`", hint=hint)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _tokenizer_config(side_files: Mapping[str, bytes]) -> dict[str, Any]:
    try:
        return parse_object(side_files.get(TOKENIZER_CONFIG, b"{}"), TOKENIZER_CONFIG)
    except MalformedInput:
        return {}


def _module_of(folder: Path, name: str) -> Module:
    """The module of `module.Class`, which exists."""
    found = REFERENCE.fullmatch(name)
    module = tuple(found["module"].split(".")) if found else ()
    if not module or not _file_of(folder, module):
        raise missing_class(folder, name)
    return module


def _file_of(folder: Path, module: Module) -> str:
    """The file of a module or package, relative to the folder; empty if there is none."""
    if len(module) > DEPTH or any(len(part.encode()) > NAME_BYTES for part in module):
        return ""
    stem = "/".join(module)
    return next((name for name in (f"{stem}.py", f"{stem}/__init__.py") if (folder / name).is_file()), "")


def _imported(folder: Path, name: str, content: bytes) -> Iterator[Module]:
    """The modules in the folder that a file imports relatively; raises MalformedInput if one is missing."""
    package = tuple(name.split("/")[:-1])
    for node in ast.walk(_parsed(name, content)):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        above = len(package) - (node.level - 1)
        base = (*package[: max(above, 0)], *(node.module.split(".") if node.module else ()))
        members = [(*base, alias.name) for alias in node.names]
        inner = [member for member in members if _file_of(folder, member)]
        if above < 0 or not ((base and _file_of(folder, base)) or len(inner) == len(members)):
            raise MalformedInput(
                f"`{name}` imports `{'.' * node.level}{node.module or members[0][-1]}`, which is not in `{folder}`",
                hint="copy all Python files of the model; the imports of a model's code are relative to its folder",
            )
        yield from [base, *inner] if base else inner


def _parsed(name: str, content: bytes) -> ast.AST:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the style of the file
            return ast.parse(content.removeprefix(BOM_UTF8).decode())
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        where = f"line {error.lineno}: {error.msg}" if isinstance(error, SyntaxError) else first_line(error, 120)
        raise MalformedInput(f"`{name}` is not valid Python: {where}", hint="copy the model's code again") from error


def with_copied_code(checkpoint: Checkpoint) -> Checkpoint:
    """A folder with the Python files that its configs name, copied as data, never run; a warning if impossible."""
    if not has_code(checkpoint.config, checkpoint.side_files):
        return checkpoint
    try:
        files = code_of(checkpoint.path, checkpoint.config, checkpoint.side_files)
    except MalformedInput as problem:
        note = f"the model's own code is not copied: {problem.message}"
        return replace(checkpoint, warnings=(*checkpoint.warnings, note))
    return replace(checkpoint, side_files={**checkpoint.side_files, **files})
