"""Opening what runs a model: the graphs, the eager model, or ONNX Runtime GenAI."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from llmconv.errors import UsageProblem
from llmconv.generation.genai import GenaiEngine
from llmconv.generation.model_files import ModelFiles
from llmconv.runtime.context_length import context_length
from llmconv.runtime.onnxruntime.graph_entry import graph_entries
from llmconv.runtime.onnxruntime.runner import OrtRunner
from llmconv.runtime.onnxruntime.session_settings import SessionSettings
from llmconv.runtime.onnxruntime.weight_memory import WeightMemory
from llmconv.runtime.runner import Runner

DTYPES = ("float32", "float16", "bfloat16")
"""Dtypes of the eager model."""


def load_runner(
    files: ModelFiles,
    backend: str,
    settings: SessionSettings | None = None,
    *,
    adapter: str | Path | None = None,
    trust_remote_code: bool = False,
    device: str | None = None,
    dtype: str | None = None,
) -> Runner:
    """The graphs, or the eager model (torch is imported only for that).

    Args:
        files: where the graphs and the configuration are.
        backend: `onnx` or `torch`.
        settings: session settings of onnxruntime; `torch` takes the number of threads from them.
        adapter: PEFT adapter folder, for `torch`.
        trust_remote_code: run the model code in the folder, for `torch`.
        device: torch's name of the device, for `torch`; None for the CPU.
        dtype: `float32`, `float16` or `bfloat16`, for `torch`; None for that of the weights.

    Raises:
        InputRefused: the folder has no graphs, or transformers cannot load it.
        UsageProblem: an unknown backend, device or dtype, or what only `torch` takes for the graphs.
    """
    if backend == "onnx":
        refuse_torch_options(adapter, device, dtype)
        WeightMemory.of(_graph_files(files), settings or SessionSettings()).announce()
        if files.prefill:
            return OrtRunner.from_files(files.prefill, files.decode, settings)
        return OrtRunner.from_folder(files.folder, settings)
    if backend != "torch":
        raise UsageProblem(f"unknown backend `{backend}`", hint="give `onnx`, `torch` or `genai`")
    _refuse_session(settings)
    if dtype not in (None, *DTYPES):
        raise UsageProblem(f"unknown dtype `{dtype}`", hint=f"give one of: {', '.join(DTYPES)}")
    from llmconv.runtime.eager.torch_runner import TorchRunner  # noqa: PLC0415 - imports torch

    return TorchRunner(
        files.folder,
        dtype or "auto",
        code=files.folder if trust_remote_code else None,
        adapter=Path(adapter) if adapter else None,
        threads=settings.threads if settings else 0,
        device=device or "cpu",
    )


def _graph_files(files: ModelFiles) -> list[Path]:
    """The graphs that a runner of these files opens."""
    if files.prefill:
        return [path for path in (files.prefill, files.decode) if path]
    entries = {entry.role: entry for entry in graph_entries(files.folder)}
    roles = ("prefill", "decode") if {"prefill", "decode"} <= entries.keys() else ("unified", *entries)[:1]
    return [path for role in roles if role in entries for path in entries[role].paths(files.folder)]


def load_genai(files: ModelFiles, settings: SessionSettings | None) -> GenaiEngine:
    """The folder's graphs in ONNX Runtime GenAI, an optional package.

    Args:
        files: found from a folder, not from single graphs.
        settings: session settings of onnxruntime.

    Raises:
        InputRefused: onnxruntime-genai is not installed, or the folder was not exported for it.
        UsageProblem: a single graph, or settings that GenAI does not have.
    """
    if files.prefill:
        raise UsageProblem("GenAI opens folders, not single graphs", hint="give the folder that has genai_config.json")
    return GenaiEngine.load(files.folder, settings, context_length(files.folder))


def refuse_torch_options(adapter: str | Path | None, device: str | None, dtype: str | None) -> None:
    """Refuses what only the eager model takes.

    Args:
        adapter: PEFT adapter folder.
        device: torch's name of a device.
        dtype: of the weights.

    Raises:
        UsageProblem: one of them is given.
    """
    if adapter is not None:
        raise UsageProblem(
            "graphs take no adapter", hint="give `--backend torch`, or merge it: `llmconv merge-lora BASE ADAPTER`"
        )
    if device is not None:
        raise UsageProblem(
            "`device` is for `--backend torch`",
            hint='for graphs give `--provider cuda`, in Python `SessionSettings(provider="cuda")`',
        )
    if dtype is not None:
        raise UsageProblem(
            "`dtype` is for `--backend torch`", hint="graphs compute in the type of `llmconv export --precision`"
        )


def _refuse_session(settings: SessionSettings | None) -> None:
    """Refuses settings of onnxruntime, which the eager model does not use."""
    names = [field.name for field in fields(SessionSettings) if field.name != "threads"]
    odd = [name for name in names if settings and getattr(settings, name) != getattr(SessionSettings(), name)]
    if odd:
        raise UsageProblem(
            f"`{odd[0]}` is a setting of onnxruntime, which `backend` torch does not use",
            hint="leave it out and give `device`; or leave out `backend`",
        )
