"""What `--target` means: one row per target, with the options that suit its provider unless others are given."""

from __future__ import annotations

from dataclasses import dataclass

from llmconv.errors import UsageProblem

FLOAT32, FLOAT16, BFLOAT16 = "float32", "float16", "bfloat16"


@dataclass(frozen=True)
class Target:
    """One provider of onnxruntime."""

    precisions: tuple[str, ...] = (FLOAT32, FLOAT16, BFLOAT16)  # dtypes that its kernels compute in
    # precision for weights that are stored in half precision: `stored` for the dtype of the weights
    half: str = "stored"
    whole: str = FLOAT32  # precision for weights that are stored in float32
    # precisions in which its `GroupQueryAttention` runs our graphs, which give it the mask as a bias
    grouped_query: tuple[str, ...] = ()
    opset: int | None = None  # version of the standard operators for a growing cache; None for the usual one
    compared: bool = True  # whether `export` compares the graphs with the kernels of the provider
    no_buffer: str = ""  # the fault of its `GroupQueryAttention` for which a shared buffer is refused; empty for none


TARGETS = {
    "ort-cpu": Target(half=FLOAT32, compared=False),
    "ort-cuda": Target(grouped_query=(FLOAT16, BFLOAT16)),
    # neither has opset 23's Attention, which opset 21 writes as products and a softmax
    "ort-webgpu": Target(
        (FLOAT32, FLOAT16),
        FLOAT16,
        FLOAT16,
        opset=21,
        # onnxruntime 1.27, 8 lanes: 4 tokens after 5 are off by 0.06 in a lone node, 0.4 in logits
        no_buffer="computes wrong numbers for several new tokens on adapters with small subgroups",
    ),
    "ort-dml": Target(
        (FLOAT32, FLOAT16),
        FLOAT16,
        FLOAT16,
        opset=21,
        no_buffer="does not read the mask that graphs with a shared buffer give it",
    ),
}


@dataclass(frozen=True)
class Preset:
    """The options of an export that a target decides, each as given or else as the target's row has it."""

    precision: str
    cache: str
    opset: int | None


def find_preset(target: str, given: Preset, stored: str, *, buffers: bool, growing: bool) -> Preset:
    """The options of an export for a target; those that are `given` win (the others are empty, or None).

    `stored` is the dtype of the weights; `buffers`: the model and the other options allow `--cache shared-buffer`;
    `growing`: a growing cache keeps its axes dynamic. Raises UsageProblem: an option that the provider cannot run.
    """
    row = TARGETS[target]
    half = stored if row.half == "stored" else row.half
    precision = given.precision or (half if stored in (FLOAT16, BFLOAT16) else row.whole)
    if precision not in row.precisions:
        raise UsageProblem(
            f"`--target {target}` has no kernels for `--precision {precision}`", hint="`--precision float16 -o OUT`"
        )
    if given.cache == "shared-buffer" and row.no_buffer:
        raise UsageProblem(
            f"`GroupQueryAttention` of `{target}` {row.no_buffer}", hint="leave out `--cache shared-buffer`"
        )
    shared = buffers and precision in row.grouped_query
    cache = given.cache or ("shared-buffer" if shared else "growing")
    opset = given.opset or (row.opset if cache == "growing" and growing else None)
    return Preset(precision, cache, opset)
