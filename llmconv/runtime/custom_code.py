"""Custom code of a model: the classes named by `auto_map`, in Python modules next to `config.json`.

    "auto_map": {"AutoConfig": "configuration_x.XConfig", "AutoModelForCausalLM": "modeling_x.XForCausalLM"}

A checkpoint is data: these modules are imported only with the consent of the caller (`--trust-remote-code`). They are
imported from the folder; nothing is copied into a cache, and nothing is written to the folder.
"""

from __future__ import annotations

import hashlib
import importlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from llmconv.checkpoint import read_json
from llmconv.errors import LlmconvError, MalformedInput, UnsupportedInput, first_line
from llmconv.model_code import (
    CONFIG_CLASS,
    REFERENCE,
    TOKENIZER_CLASS,
    TOKENIZER_CONFIG,
    auto_map,
    collect_code,
    missing_class,
    model_class,
)

TRUST_HINT = "read the code; if you trust it, `--trust-remote-code` runs it"


def uses_custom_code(fields: Mapping[str, Any], trusted: bool) -> bool:
    """Whether custom code builds the model: some is there, and trusted; UnsupportedInput if nothing else can."""
    named = model_class(fields)
    if not named or trusted:
        return bool(named)
    if str(fields.get("model_type")) in _native_configs():
        return False
    raise UnsupportedInput(
        f"transformers has no model `{fields.get('model_type')}`, and the code next to `config.json`"
        f" (`{named}`) is not executed",
        hint=TRUST_HINT,
    )


def custom_classes(folder: Path, fields: Mapping[str, Any]) -> tuple[Any, Any]:
    """Imports the folder's code and returns its config class and model class.

    The pair is registered with `AutoModelForCausalLM`. If the config class is transformers' own, a subclass of it is
    registered, so that other models are not affected. Raises MalformedInput for a missing class, UnsupportedInput if
    the code raises an exception.
    """
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - only a model with code of its own pays for it

    named = [model_class(fields), *filter(None, [auto_map(fields).get(CONFIG_CLASS)])]
    with custom_code_errors(folder):
        package = _package(folder, named)
        model = _load(folder, package, named[0])
        if len(named) > 1:
            config = _load(folder, package, named[1])
        else:
            native = _native_configs()[fields["model_type"]]
            config = type(native.__name__, (native,), {"__module__": native.__module__})
        AutoModelForCausalLM.register(config, model, exist_ok=True)
    return config, model


def custom_tokenizer_class(folder: Path, trusted: bool) -> Any:
    """The tokenizer class of the folder's code; None if there is none or the code is not trusted."""
    reference = tokenizer_reference(folder)
    if not (trusted and reference):
        return None
    with custom_code_errors(folder):
        return _load(folder, _package(folder, [reference]), reference)


def tokenizer_reference(folder: Path) -> str:
    """The class named by `tokenizer_config.json`, the fast one of two; empty if there is none."""
    path = folder / TOKENIZER_CONFIG
    return auto_map(read_json(path)).get(TOKENIZER_CLASS, "") if path.is_file() else ""


@contextmanager
def custom_code_errors(folder: Path | None) -> Iterator[None]:
    """Context that turns exceptions of a folder's custom code into UnsupportedInput; with None, they pass unchanged."""
    try:
        yield
    except LlmconvError:
        raise
    except Exception as error:
        if folder is None:
            raise
        reason = first_line(error, 200)
        hint = "install what it imports; it may be for another version of transformers; `-v` shows where"
        raise UnsupportedInput(f"the code in `{folder}` fails: {type(error).__name__}: {reason}", hint=hint) from error


def _native_configs() -> Mapping[str, Any]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: PLC0415

    mapping: Mapping[str, Any] = CONFIG_MAPPING
    return mapping


def _load(folder: Path, package: str, reference: str) -> Any:
    """The class `module.Name` in a folder registered as a package; raises MalformedInput if it is not there."""
    if not (named := REFERENCE.fullmatch(reference)):
        raise missing_class(folder, reference)
    writes_bytecode, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        module = importlib.import_module(f"{package}.{named['module']}")
    finally:
        sys.dont_write_bytecode = writes_bytecode
    found = getattr(module, named["name"], None)
    if not isinstance(found, type):
        problem = f"`auto_map` names `{reference}`, and that module of `{folder}` has no such class"
        raise MalformedInput(problem, hint="the Python files belong to another version of the model; copy them again")
    return found


def _package(folder: Path, names: Iterable[str]) -> str:
    """Registers the folder as a package, so that its modules can import each other; one package per content.

    The content is the files of the classes `names`, with all that they import; raises as `collect_code`.
    """
    content = hashlib.sha256(str(folder.resolve()).encode())
    for name, text in collect_code(folder, names).items():
        content.update(b"%s\0%d\0" % (name.encode(), len(text)) + text)
    package = ModuleType(f"llmconv_own_code_{content.hexdigest()[:16]}")
    package.__path__ = [str(folder.resolve())]
    sys.modules.setdefault(package.__name__, package)
    return package.__name__
