"""Device and dtype as transformers' pipeline takes them, for graphs: a provider of onnxruntime, and a check."""

from __future__ import annotations

from typing import Any

from llmconv.errors import UsageProblem
from llmconv.generation.model import TextModel
from llmconv.generation.runners import is_model
from llmconv.generation.torch_options import TorchOptions
from llmconv.runtime.onnxruntime.session_settings import SessionSettings, provider_name


def placed(model: Any, backend: str | None, device: Any, dtype: Any, options: dict[str, Any]) -> dict[str, Any]:
    """The options that open a model on a device; `dtype` is passed on to torch alone.

    Args:
        model: what is opened.
        backend: `torch`, or a runtime of graphs.
        device: as transformers takes it: a name, a number or torch's object.
        dtype: likewise.
        options: others, which may have a `provider` or a `session`.

    Raises:
        UsageProblem: the runtime does not have the device, or the options contradict each other.
    """
    given = TorchOptions.of(None, device, dtype)
    if backend == "torch" or is_model(model) or isinstance(model, TextModel):
        return {**options, "device": given.device, "dtype": given.dtype}
    kind, _, number = (given.device or "cpu").partition(":")
    if kind == "cpu":
        return options
    if options.get("provider") or options.get("session") or options.get("session_config"):
        raise UsageProblem("`device` and the session settings both select a device", hint="leave out `device`")
    if kind != "cuda" or not (number or "0").isdigit():
        raise UsageProblem(f"graphs do not run on the device `{given.device}`", hint="give `cpu`, `cuda` or `cuda:1`")
    session = SessionSettings(provider=provider_name(kind), provider_options={"device_id": number or "0"})
    return {**options, "session": session}


def require_dtype(model: TextModel, dtype: Any) -> None:
    """Requires that open graphs compute in a dtype, which only an export changes.

    Args:
        model: an open model; that of torch has the dtype already.
        dtype: as transformers takes it; None and `auto` for any.

    Raises:
        UsageProblem: they compute in another one.
    """
    wanted = TorchOptions.of(None, None, dtype)
    if model.backend == "torch" or wanted.dtype is None:
        return
    wanted.require_dtype()
    found = str(getattr(model.runner, "dtype", "the type of their export"))
    if found != wanted.dtype:
        raise UsageProblem(
            f"the graphs compute in {found}, not in {wanted.dtype}",
            hint=f"`llmconv export MODEL --precision {wanted.dtype}`, or leave out `dtype`",
        )
