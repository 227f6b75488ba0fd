"""Keywords that pipelines of MindSpore Lite and MindFormers have: ours in their place, or what to do instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmconv.argument_checks import fitted, require_least
from llmconv.errors import UsageProblem

BACKENDS = {"mslite": "onnx", "ms": "torch", "mindspore": "torch"}
"""Their backends, and ours of the same kind: graphs, or the model itself."""

INSTEAD = {
    "ge_config_path": "`session_config=FILE` gives options of onnxruntime; those of GE have no meaning there",
    "audio_processor": "models with sounds are exported without them: their text model alone",
    "model_type": "`model_type` is read from the model's `config.json`; leave it out",
    "model_name": "give the name as `model`, see `register_model`",
    "full_model_path": "give the graph as `model`",
    "prefill_model_path": "give the pair of graphs as `model`: `(PREFILL, DECODE)`",
    "increment_model_path": "give the pair of graphs as `model`: `(PREFILL, DECODE)`",
    "target": "`device` or `provider` selects where graphs run",
    "is_sample_acceleration": "`llmconv export --postprocess topk:K` makes graphs that return the likeliest "
    "tokens; they are used without an option",
}
"""Keywords without an argument here, and the counterpart."""


def own_keywords(
    backend: str | None, device: Any, options: Mapping[str, Any]
) -> tuple[str | None, Any, dict[str, Any]]:
    """Backend, device and options of `pipeline` with the other pipelines' keywords replaced.

    Args:
        backend: ours, or one of `BACKENDS`.
        device: as transformers takes it.
        options: all other keywords. `device_id` is the number of the device, `infer_seq_length` the `max_length`,
            `rank_id` must be 0; `is_sample_acceleration=False` and None are left out.

    Raises:
        UsageProblem: a keyword without an argument here, or one that contradicts ours; the hint has the counterpart.
    """
    kept = {name: value for name, value in options.items() if name not in _TAKEN}
    given = {name: value for name, value in options.items() if name in _TAKEN and value is not None}
    for name in INSTEAD:
        if kept.get(name) not in (None, False):
            raise UsageProblem(f"`{name}` is not an argument of `pipeline`", hint=INSTEAD[name])
        kept.pop(name, None)
    if "rank_id" in given and _number(given, "rank_id"):
        raise UsageProblem(
            f"`rank_id` is {given['rank_id']}, and one process runs all graphs",
            hint="leave it out; `llmconv export --stages N` divides the graphs, `stage_at` names other processes",
        )
    if "device_id" in given:
        device, kept = _placed(_number(given, "device_id"), device, kept)
    if "infer_seq_length" in given:
        kept = _limited(_number(given, "infer_seq_length"), kept)
    return BACKENDS.get(backend or "", backend), device, kept


_TAKEN = ("rank_id", "device_id", "infer_seq_length")


def _number(given: Mapping[str, Any], name: str) -> int:
    number: int = fitted(given[name], int, name)
    return require_least(number, int(name == "infer_seq_length"), name)


def _placed(number: int, device: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The device with its number; a provider of onnxruntime that is CUDA's becomes one."""
    provider = options.get("provider")
    if provider is not None and (device is not None or str(provider).lower() not in ("cuda", "cpu")):
        raise UsageProblem(
            f"`device_id` and `provider` {provider} do not go together",
            hint="give the number as an option of the provider, in a file of `session_config`",
        )
    kind = str(provider or device or "cuda").lower()
    if kind == "cpu":
        return device, options  # there is one
    if kind != "cuda":
        raise UsageProblem(
            f"`device` {device} and `device_id` both name a device", hint=f'give `device="cuda:{number}"`'
        )
    return f"cuda:{number}", {name: value for name, value in options.items() if name != "provider"}


def _limited(length: int, options: dict[str, Any]) -> dict[str, Any]:
    """The options with a length of prompt and text together of at most `length` tokens."""
    if options.get("max_new_tokens") is not None:
        raise UsageProblem(
            "`infer_seq_length` and `max_new_tokens` both set the length",
            hint="give one of them: `infer_seq_length` includes the prompt, as `max_length` does",
        )
    longest = options.get("max_length")
    if longest is not None and fitted(longest, int, "max_length") > length:
        raise UsageProblem(
            f"`max_length` {longest} is more than `infer_seq_length` {length}", hint="give `max_length` alone"
        )
    return {**options, "max_length": length if longest is None else longest}
