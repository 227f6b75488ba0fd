"""`--kv-cache int8`: what it requires of the other options and of the model."""

from __future__ import annotations

from llmconv.errors import UnsupportedInput, UsageProblem
from llmconv.export.export_options import ExportOptions
from llmconv.export.graph_spec import FLOAT32

SHARED, CPU_TARGET = "shared-buffer", "ort-cpu"


def with_kv_cache(given: ExportOptions) -> ExportOptions:
    """The options, with a shared buffer for a cache of codes; UsageProblem for options that contradict `kv_cache`."""
    kind = given["kv_cache"]
    if kind is None:
        return given
    contradictions = {
        f"--cache {given['cache']}": given["cache"] not in (None, SHARED),
        f"--shapes {given['shapes']}": given["shapes"] != "dynamic",
        f"--target {given['target']}": given["target"] not in (None, CPU_TARGET),
        f"--precision {given['precision']}": given["precision"] not in (None, FLOAT32),
        "--stages": given["stages"] > 1,
        "--prefix": given["prefix"] is not None,
    }
    if found := next((option for option, wrong in contradictions.items() if wrong), ""):
        raise UsageProblem(
            f"`--kv-cache {kind}` needs float32 graphs with a shared buffer for onnxruntime's CPU, not `{found}`",
            hint=f"leave out `{found}`, or `--kv-cache`",
        )
    return {**given, "cache": SHARED}


def require_kv_cache(given: ExportOptions, family: object, *, fits: bool) -> None:
    """Refuses a model whose attention cannot read codes, and a precision that the target chose.

    `given` are the options after the target's; `fits` is whether `GroupQueryAttention` can keep the model's cache.

    Raises:
        UnsupportedInput: the model does not fit.
        UsageProblem: the graphs compute in another dtype than float32.
    """
    if not fits:
        raise UnsupportedInput(
            f"`{family}` has a cache that GroupQueryAttention cannot keep, the only operator for `--kv-cache int8`",
            hint="leave out `--kv-cache`",
        )
    if given["precision"] not in (None, FLOAT32):
        raise UsageProblem(
            f"`--kv-cache {given['kv_cache']}` needs float32 graphs, and the target computes in {given['precision']}",
            hint="add `--precision float32`",
        )
