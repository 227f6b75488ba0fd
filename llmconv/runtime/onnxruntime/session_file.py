"""Session options in an .ini file, or in a JSON file with the same sections.

[session]                   fields of onnxruntime.SessionOptions
intra_op_num_threads = 4
graph_optimization_level = extended
[entries]                   session configuration keys
session.intra_op.allow_spinning = 0
[provider]                  its name and its options
name = cuda
device_id = 0
[free_dimensions]           symbols of the graph's axes
batch_size = 1
"""

from __future__ import annotations

import configparser
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import onnxruntime as ort

from llmconv.checkpoint import read_json
from llmconv.errors import InputRefused, MalformedInput
from llmconv.runtime.onnxruntime.session_settings import LEVELS, SessionSettings

SECTIONS = ("session", "entries", "provider", "free_dimensions")
TRUTHS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}

COUNTERPARTS = {
    "ascend_context": "[provider] has the name and the options of what runs the graph",
    "ge_session_options": "[session] has the options of the memory arena, [provider] those of the device",
    "ge_graph_options": "[free_dimensions] fixes axes; the graphs take any size without it",
    "graph_kernel_param": "[session] has graph_optimization_level",
    "ge_global_options": "[session] and [entries] have the options of onnxruntime",
}
"""Sections of MindSpore Lite's graph engine configuration, with a hint to the equivalent for onnxruntime."""


def read_session_file(path: Path, settings: SessionSettings | None = None) -> SessionSettings:
    """`settings` (default: onnxruntime's) updated from a file.

    Raises:
        InputRefused: the file cannot be read, or is written for another runtime.
        MalformedInput: the file is neither .ini nor JSON, or has an unknown section or an invalid value.
    """
    content = _read(path)
    _refuse_unknown(path, content)
    provider = {name: str(value) for name, value in content.get("provider", {}).items()}
    settings = settings or SessionSettings()
    name = provider.pop("name", settings.provider)
    return replace(
        settings,
        provider=name,
        provider_options={**settings.provider_options, **provider},
        entries={**settings.entries, **{key: str(value) for key, value in content.get("entries", {}).items()}},
        attributes={**settings.attributes, **_attributes(path, content.get("session", {}))},
        free_dimensions={name: _int(path, name, size) for name, size in content.get("free_dimensions", {}).items()},
    )


def _read(path: Path) -> dict[str, dict[str, Any]]:
    """Sections by name."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputRefused(f"`{path}` cannot be read: {error}", hint="give an .ini or a JSON file") from error
    if text.lstrip().startswith("{"):
        content = read_json(path, by_hand=True)
        if not all(isinstance(section, dict) for section in content.values()):
            _malformed(path, "has a section that is not an object")
        return content
    parser = configparser.ConfigParser(interpolation=None, delimiters=("=",), inline_comment_prefixes=(";", "#"))
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    try:
        parser.read_string(text)
    except configparser.Error as error:
        raise MalformedInput(
            f"`{path.name}` is not an .ini file: {str(error).splitlines()[0]}", hint="see docs/generation.md"
        ) from error
    return {name: dict(parser[name]) for name in parser.sections()}


def _refuse_unknown(path: Path, content: Mapping[str, Any]) -> None:
    for name in content:
        if name in COUNTERPARTS:
            raise InputRefused(
                f"`{path.name}` is written for MindSpore's graph engine (section `{name}`)", hint=COUNTERPARTS[name]
            )
        if name not in SECTIONS:
            _malformed(path, f"has the unknown section `{name}`")


def _attributes(path: Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `SessionOptions`, converted to the type of each."""
    defaults = ort.SessionOptions()
    return {name: _value(path, name, value, getattr(defaults, name, None)) for name, value in fields.items()}


def _value(path: Path, name: str, value: Any, default: Any) -> Any:
    if name == "graph_optimization_level":
        level = LEVELS.get(str(value).lower(), str(value).upper())
        return _member(path, ort.GraphOptimizationLevel, level)
    if name == "execution_mode":
        return _member(path, ort.ExecutionMode, f"ORT_{str(value).upper().removeprefix('ORT_')}")
    if isinstance(default, bool):
        if str(value).lower() not in TRUTHS:
            _malformed(path, f"gives `{name}` the value `{value}`, which is neither true nor false")
        return TRUTHS[str(value).lower()]
    if isinstance(default, int):
        return _int(path, name, value)
    if not isinstance(default, str):
        _malformed(path, f"has the unknown session option `{name}`")
    return value


def _member(path: Path, kind: Any, name: str) -> Any:
    """A value of one of onnxruntime's enumerations."""
    if not hasattr(kind, name):
        _malformed(path, f"has the unknown value `{name}`")
    return getattr(kind, name)


def _int(path: Path, name: str, value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        _malformed(path, f"gives `{name}` the value `{value}`, which is not an integer")


def _malformed(path: Path, problem: str) -> NoReturn:
    raise MalformedInput(f"`{path.name}` {problem}", hint=f"sections are {', '.join(SECTIONS)}; see docs/generation.md")
