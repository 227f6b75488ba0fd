"""Which matrices of a model are quantized for vLLM and SGLang, and which it must `ignore`.

Both join some matrices into one (`packed_modules_mapping` of their model classes), which then has one scheme and, for
NVFP4, one global scale. They build every Linear module that `ignore` does not name as a quantized one, so a name
missing there is a missing `weight_scale` when the model is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmconv.causal_lm import mtp_tensors
from llmconv.checkpoint import is_conv1d, transposed
from llmconv.compressed.rounding import SharedPeak
from llmconv.compressed.schemes import HEAD, RELEASED, Scheme, Weight
from llmconv.convert.algebra import reshaped, slice_rows, split
from llmconv.errors import UnsupportedInput, UsageProblem
from llmconv.tensors import FLOATS, LazyTensor, lists_by_key
from llmconv.timed_patterns import MatchTime

END = ".weight"
LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block|decoder\.layers)\.\d+\.")
EMBEDDING = re.compile(
    r"(?:^|\.)(?:embed_(?:tokens|in|positions)|\w*_embeddings?|embeddings?|wte|wpe|relative_attention_bias)$"
)
"""Embedding modules, by the last part of their names; a Linear of such a name would be missing in `ignore`."""
ROUTERS = r"gate|router|wg|shared_expert_gate|shared_head|eh_proj"
TOWERS = (
    r"visual|vision\w*|vit|image\w*|audio\w*|speech\w*|\w*_projector|connector|resampler|aligner|mtp\w*|talker|code2wav"
)
STATES = r"linear_attn|mamba|mixer\.(?:in_proj|out_proj)|ssm|conv\w*|x_proj|dt_proj|indexer|altup|laurel|per_layer\w*"
KEPT = re.compile(rf"(?:^|\.)(?:{ROUTERS}|{TOWERS}|{STATES})(?:\.|$)")
"""Modules that recipes for vLLM leave as they are: routers, towers of images and sound, recurrent states, MTP heads."""

JOINED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("wq", "wk", "wv"),
)
"""Neighboring matrices that vLLM and SGLang join."""

JOINED_BY_LAST = {name: names for names in JOINED for name in names}
EXPERT = re.compile(r"(.*\.experts)\.\d+\.")
STACKED = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)(?:\.weight)?")

INPUTS_FIRST: dict[str, bool | None] = {
    **dict.fromkeys(("llama4", "llama4_text"), True),
    **dict.fromkeys(("qwen3_5_moe", "qwen3_5_moe_text"), False),
    **dict.fromkeys(("qwen3_vl_moe", "qwen3_vl_moe_text")),
}
"""Models whose experts are stacked in one tensor, and released for vLLM one by one: whether it is [experts, K, N].

None: either (`_has_inputs_first`).
"""

OTHER_STACK = re.compile(
    r"3 .*\.(?:block_sparse_moe|moe|mlp|experts)\.(?:input_linear|output_linear|fc1|fc2)(?:\.weight)?$"
    r"|2 .*\.experts\.mlp\.(?:w1|v1|w2)$"
)
"""Experts of Granite, JetMoE, Aria and DBRX in one tensor, by number of dimensions and name."""


@dataclass(frozen=True)
class OfStack:
    """Where a matrix [N, K] is in a stored stack of experts."""

    name: str
    expert: int
    first: int  # of the outputs of the expert's matrix, which are those of gate and of up
    count: int
    turned: bool  # the stack is [experts, K, N]


@dataclass(frozen=True)
class Selected:
    """What becomes of the tensors of a model."""

    tensors: Mapping[str, LazyTensor]  # those of the source, with stacked experts one by one
    weights: Mapping[str, Weight]  # those that are quantized, by name
    ignore: tuple[str, ...]  # modules that are kept
    unfit: tuple[str, ...]  # those of them that the scheme's blocks do not divide
    stacks: Mapping[str, OfStack] = field(default_factory=dict)  # of weights that are stored in stacks
    measured: str = ""  # as in `llmconv.output.plan.Plan`


def select(
    stored: Mapping[str, LazyTensor], config: Mapping[str, Any], scheme: Scheme, exclude: Sequence[str] = ()
) -> Selected:
    """The weights to quantize: matrices of layers, without routers, towers, and what `exclude` (patterns) finds.

    Raises UnsupportedInput: none is left, or stacked experts of an unknown layout; UsageProblem: a pattern is invalid
    or matches nothing.
    """
    separate = list(_one_by_one(stored, config))
    tensors = {name: tensor for name, tensor, _ in separate}
    if scheme.format == RELEASED:
        return _released(tensors, scheme, exclude)
    matrices = {name: one for name, one in tensors.items() if is_matrix(name, one) and not is_conv1d(config, name)}
    mtp, excluded = {*mtp_tensors(tensors, config)}, _excluded(exclude, tensors)
    wanted = {
        name: one
        for name, one in matrices.items()
        if LAYER.search(name) and not (KEPT.search(name.removesuffix(END)) or name in mtp or name in excluded)
    }
    unfit = {name for name, one in wanted.items() if not scheme.fits(one.shape)}
    fates = lists_by_key((fate_of(name), name) for name in matrices)
    split_up = {name for names in fates.values() if not {*names} <= wanted.keys() - unfit for name in names}
    chosen = {name: one for name, one in wanted.items() if name not in split_up}
    if not chosen and (turned := next((name for name in tensors if is_conv1d(config, name)), None)):
        raise UnsupportedInput(
            f"`{turned}` is stored transposed, as all matrices of this family (Conv1D), and engines read no such codes",
            hint="`llmconv export --quant int4` makes graphs of codes of it",
        )
    if not chosen:
        raise UnsupportedInput(
            f"no matrix of this model can be quantized as {scheme.name}",
            hint="give another `--scheme`, a smaller `--quant-block`, or fewer `--quant-exclude`",
        )
    peaks: dict[str, SharedPeak] = {}
    for names in lists_by_key((peak_of(name), name) for name in chosen).values():
        peaks |= dict.fromkeys(names, SharedPeak([(name, chosen[name]) for name in names]))
    weights = {name: Weight(name, one, peaks[name]) for name, one in chosen.items()}
    ignore = [name.removesuffix(END) for name in matrices if name not in weights]
    head = [] if any(name.endswith(HEAD) for name in ignore) else [HEAD]
    stacks = {name: place for name, _, place in separate if place and name in weights}
    return Selected(tensors, weights, (*ignore, *head), tuple(name for name in wanted if name in unfit), stacks)


def _released(tensors: Mapping[str, LazyTensor], scheme: Scheme, exclude: Sequence[str]) -> Selected:
    """All stacks of experts of a gpt-oss, of which its readers leave none as it is."""
    stacks = {name: one for name, one in tensors.items() if STACKED.fullmatch(name) and len(one.shape) == 3}
    if excluded := sorted(_excluded(exclude, tensors) & stacks.keys()):
        raise UsageProblem(
            f"`--quant-exclude` matches `{excluded[0]}`, and engines read all experts of gpt-oss as MXFP4",
            hint="leave it out: attention, routers, embedding and head are kept anyway",
        )
    if unfit := next((name for name, one in stacks.items() if one.shape[1] % scheme.unit[1]), None):
        raise UnsupportedInput(
            f"`{unfit}` has {stacks[unfit].shape[1]} inputs, and MXFP4 has groups of {scheme.unit[1]}",
            hint="no engine reads such a gpt-oss with codes; leave it as it is",
        )
    weights = {name: Weight(name, one, SharedPeak([(name, one)])) for name, one in stacks.items()}
    kept = [name.removesuffix(END) for name, one in tensors.items() if is_matrix(name, one)]
    return Selected(tensors, weights, tuple(kept), ())


def is_matrix(name: str, tensor: LazyTensor) -> bool:
    """Whether a tensor is the weight of a Linear module, as far as its name, dtype and shape tell."""
    floats = tensor.dtype.name in FLOATS and len(tensor.shape) == 2
    return floats and name.endswith(END) and not EMBEDDING.search(name.removesuffix(END))


def fate_of(name: str) -> str:
    """A key that is equal for matrices of which all or none are quantized."""
    found = EXPERT.match(name)
    return found[1] if found else peak_of(name)


def peak_of(name: str) -> str:
    """A key that is equal for matrices that vLLM joins."""
    parent, _, last = name.removesuffix(END).rpartition(".")
    return f"{parent}.{'+'.join(JOINED_BY_LAST.get(last, (last,)))}"


def _excluded(patterns: Sequence[str], tensors: Mapping[str, LazyTensor]) -> set[str]:
    if not patterns:
        return set()
    from llmconv.export.quantization.settings import EXCLUDE, matches, require_used  # noqa: PLC0415 - imports onnx

    require_used({EXCLUDE: patterns}, tensors)
    time = MatchTime()
    return {name for name in tensors if any(matches(EXCLUDE, pattern, name, time) for pattern in patterns)}


def one_by_one(tensors: Mapping[str, LazyTensor], config: Mapping[str, Any]) -> Iterator[tuple[str, LazyTensor]]:
    """The tensors, with stacked experts under the names that releases for vLLM have."""
    return ((name, tensor) for name, tensor, _ in _one_by_one(tensors, config))


def _one_by_one(
    tensors: Mapping[str, LazyTensor], config: Mapping[str, Any]
) -> Iterator[tuple[str, LazyTensor, OfStack | None]]:
    for name, tensor in tensors.items():
        found = STACKED.fullmatch(name)
        if not found or len(tensor.shape) != 3 or tensor.dtype.name not in FLOATS:
            if OTHER_STACK.search(f"{len(tensor.shape)} {name}") and tensor.dtype.name in FLOATS:
                raise _unknown_layout(name, str(config.get("model_type")))
            yield name, tensor, None
            continue
        kind = str(config.get("model_type"))
        if kind == "gpt_oss":
            yield name, tensor, None
            continue
        if kind not in INPUTS_FIRST:
            raise _unknown_layout(name, kind)
        inputs_first = INPUTS_FIRST[kind]
        if inputs_first is None:
            inputs_first = _has_inputs_first(name, tensor, config, of_gate=found[2] == "gate_up_proj")
        for number in range(tensor.shape[0]):
            matrix = _matrix(tensor, number, inputs_first=inputs_first)
            halves = dict(zip(("gate_proj", "up_proj"), split(matrix, 0, 2), strict=True))
            parts = halves if found[2] == "gate_up_proj" else {"down_proj": matrix}
            for at, (end, one) in enumerate(parts.items()):
                rows = one.shape[0]
                yield f"{found[1]}.{number}.{end}{END}", one, OfStack(name, number, at * rows, rows, inputs_first)


def _unknown_layout(name: str, kind: str) -> UnsupportedInput:
    return UnsupportedInput(
        f"the experts of `{name}` are stacked in one tensor, in a layout that is not known for `{kind[:40]}`",
        hint="write the model with one tensor per expert, as transformers' `save_pretrained` does for most",
    )


def _has_inputs_first(name: str, stack: LazyTensor, config: Mapping[str, Any], *, of_gate: bool) -> bool:
    """Whether a stack is [experts, K, N], of a model that has been saved in both ways; UnsupportedInput: it is square.

    Qwen3-VL is released so, and transformers 5 saves [experts, N, K] (`Transpose(check_dims=True)` of its mapping).
    """
    hidden = (config.get("text_config") or config).get("hidden_size")
    _, first, last = stack.shape
    if first == last or hidden not in (first, last):
        raise UnsupportedInput(
            f"`{name}` has the shape {list(stack.shape)}, which does not tell inputs from outputs",
            hint="write the model with one tensor per expert",
        )
    return bool(first == hidden) == of_gate


def _matrix(stack: LazyTensor, number: int, *, inputs_first: bool) -> LazyTensor:
    """One matrix [N, K] of a stack [experts, N, K], or of [experts, K, N]."""
    experts, rows, columns = stack.shape
    matrix = slice_rows(reshaped(stack, (experts * rows, columns)), number * rows, (number + 1) * rows)
    return transposed(matrix) if inputs_first else matrix
