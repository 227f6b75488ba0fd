"""SessionOptions: the options of the command line for sessions of onnxruntime, as keyword arguments."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict, TypeVar

from llmconv.errors import UsageProblem
from llmconv.runtime.onnxruntime.packed_cache import default_folder
from llmconv.runtime.onnxruntime.session_file import read_session_file
from llmconv.runtime.onnxruntime.session_settings import SessionSettings, StageOptions, provider_name

Options = TypeVar("Options", SessionSettings, StageOptions)


class SessionOptions(TypedDict, total=False):
    """How onnxruntime runs graphs; with the names of the options of the command line.

    Attributes:
        session: session settings of onnxruntime; the options below replace single ones.
        provider: provider of onnxruntime: `cpu`, `cuda`, …; the CPU runs the rest.
        threads: threads of onnxruntime or torch; 0 for one per core.
        session_config: file of session settings, .ini or JSON.
        timeout: time limit in seconds for a run of a small graph; larger models and prompts get more (default: 60).
        prepack: copy weights to a faster layout in memory.
        packed_cache: as `prepack`, in a file that later runs map.
    """

    session: SessionSettings | None
    provider: str | None
    threads: int | None
    session_config: str | Path | None
    timeout: float | None
    prepack: bool
    packed_cache: bool


def session_settings(options: SessionOptions) -> SessionSettings:
    """Session settings of onnxruntime: those of `session` or a file, with single options replaced.

    Args:
        options: those that are not for onnxruntime are ignored.

    Raises:
        InputRefused: the file cannot be read.
        UsageProblem: both `session` and a file, or an invalid provider.
    """
    session, file = options.get("session"), options.get("session_config")
    if session and file:
        raise UsageProblem("`session` and `session_config` exclude each other", hint="give one of them")
    found = session or SessionSettings()
    provider, threads = options.get("provider"), options.get("threads")
    if file:
        found = read_session_file(Path(file), found)
    stages = {number: _overridden(own, provider, threads) for number, own in found.stages.items()}
    found = replace(_overridden(found, provider, threads), stages=stages)
    changes: dict[str, Any] = {} if threads is None else {"threads": threads}
    if options.get("timeout") is not None:
        changes["timeout"] = options["timeout"]
    if options.get("prepack"):
        changes["prepack"] = True
    if options.get("packed_cache"):
        changes["packed_cache"] = default_folder()
    return replace(found, **changes)


def _overridden(found: Options, provider: str | None, threads: int | None) -> Options:
    """Session settings, or those of a stage, without what single options replace."""
    if threads is not None:
        attributes = {name: value for name, value in found.attributes.items() if name != "intra_op_num_threads"}
        found = replace(found, attributes=attributes)
    if provider is not None and provider_name(provider) != found.provider:
        found = replace(found, provider=provider_name(provider), provider_options={})
    return found
