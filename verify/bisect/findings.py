"""Describes a fault in words: one function per kind, tried in order; a new kind is one function and one row."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from itertools import combinations
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import torch

from llmconv.runtime.extra_inputs import layer_of
from llmconv.runtime.onnxruntime.guard import attributes
from llmconv.tensors import Array
from llmconv.verify.bisect.replay import IN, MASK, OUT, layer_of_scope
from llmconv.verify.bisect.suspect import HIDDEN, Finding, Suspect, differ, difference

__all__ = ["FINDINGS", "Finding", "Suspect", "find"]

FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu (erf)": torch.nn.functional.gelu,
    "gelu (tanh)": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "quick gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": torch.nn.functional.silu,
    "relu": torch.relu,
    "squared relu": lambda x: torch.relu(x) ** 2,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softplus": torch.nn.functional.softplus,
    "identity": lambda x: x,
}
CLOSE = 2e-6  # relative tolerance for a function computed in float32


def activation(suspect: Suspect) -> Finding | None:
    """An activation function other than the model's."""
    for node in suspect.nodes:
        scope = suspect.scope(node)
        ports = {record.op: record.exact for record in suspect.trace.ports if record.scope == scope}
        if IN not in ports or OUT not in ports or ports[IN].shape != ports[OUT].shape:
            continue
        if next(suspect.replay.model.get_submodule(scope).parameters(), None) is not None:
            continue
        wanted, found = _named(ports[IN], ports[OUT]), _graph_function(suspect, scope, ports[IN].size)
        if wanted and found != wanted:
            return Finding(f"activation {found or _form(suspect)} in the graph, {wanted} in the model", node)
    return None


def _form(suspect: Suspect) -> str:
    numbers = (value for name in suspect.nodes[0].input if (value := suspect.constant(name)) is not None)
    number = next((float(value.reshape(())) for value in numbers if value.size == 1), None)
    return "of another form" if number is None else f"of another form (constant {number:.6g})"


def _graph_function(suspect: Suspect, scope: str, size: int) -> str:
    """Name of the function that the graph computes in the module; empty if it is unknown."""
    trace = suspect.trace
    nodes = [node for node in trace.index.nodes if trace.scopes.of(node) == scope]
    made = {name for node in nodes for name in node.output}
    given = [n for node in nodes for n in node.input if n not in made and _size(suspect, n) == size]
    handed = [n for n in made if any(trace.scopes.of(u) != scope for u in trace.index.users[n])]
    pairs = ((trace.values[a], trace.values[b]) for a in given for b in handed if _size(suspect, b) == size)
    return next((name for a, b in pairs if (name := _named(a.astype(np.float64), b))), "")


def _size(suspect: Suspect, name: str) -> int:
    value = suspect.trace.values.get(name)
    return -1 if value is None else value.size


def _named(given: Array, made: Array) -> str:
    """Name of the function that maps one array to the other; empty if it is not in the table."""
    inputs = torch.from_numpy(np.ascontiguousarray(given, dtype=np.float64)).reshape(-1)
    scale = float(np.sqrt(np.mean(np.square(made, dtype=np.float64)))) or 1.0
    for name, function in FUNCTIONS.items():
        error = function(inputs).numpy() - made.reshape(-1)
        if float(np.sqrt(np.mean(np.square(error, dtype=np.float64)))) < CLOSE * scale:
            return name
    return ""


def mask(suspect: Suspect) -> Finding | None:
    """The first layer whose mask differs from the model's."""
    call = suspect.replay.call
    for name, found, wanted in _pairs(suspect):
        graph, model = np.broadcast_arrays(found, wanted)
        real = call.valid[:, None, :, None]
        more, less = graph & ~model & real, model & ~graph & real
        if more.any() or less.any():
            text = _more_text(suspect, more) if more.any() else _less_text(less)
            return Finding(text, _first(suspect, name))
    return None


def _pairs(suspect: Suspect) -> Iterator[tuple[str, Array, Array]]:
    """Names of masks, their visible keys, and those of the model's mask of the same layer, in order of layers."""
    trace = suspect.trace
    given = {
        layer_of_scope(record.scope): record.exact
        for record in trace.ports
        if record.op == MASK and record.exact.ndim == 4 and layer_of_scope(record.scope) is not None
    }
    for node in trace.index.nodes:
        layer = layer_of_scope(trace.scope(node))
        for name in node.input if layer in given else ():
            maker = trace.index.maker.get(name)
            if maker is None or layer_of_scope(trace.scope(maker)) is not None:
                continue  # masks are computed outside the layers
            found, wanted = _visible(trace.values.get(name)), _visible(given[layer])
            if found is not None and wanted is not None and found.shape[-2:] == wanted.shape[-2:]:
                yield name, found, wanted


def _visible(value: Array | None) -> Array | None:
    """The visible keys, bool [batch or 1, heads or 1, new tokens, all tokens]; None if the value is not a mask."""
    if value is None or value.ndim != 4:
        return None
    if value.dtype.kind == "b":
        return value
    visible: Array = value > HIDDEN
    return visible if value.dtype.kind == "f" and (value <= 0).all() and (value[visible] == 0).all() else None


def _first(suspect: Suspect, name: str) -> onnx.NodeProto | None:
    """The first node that differs; the mask's node if a layer reads the mask of another kind of layer."""
    node = suspect.piece.node if suspect.piece else None
    if node is not None and layer_of_scope(suspect.scope(node)) is None:
        return node
    maker: onnx.NodeProto = suspect.trace.index.maker[name]
    return maker


def _more_text(suspect: Suspect, more: Array) -> str:
    call, total = suspect.replay.call, more.shape[-1]
    rows, _, queries, keys = np.nonzero(more)
    distance = queries + total - more.shape[-2] - keys
    padding = np.pad(call.attention_mask == 0, ((0, 0), (total - call.attention_mask.shape[1], 0)))
    window = getattr(suspect.config, "sliding_window", None)
    if padding[rows, keys].all():
        return "padding is attended to"
    if (distance < 0).all():
        return "a token sees later tokens"
    if window and (distance >= window).all():
        return f"tokens outside the sliding window of {window} are seen"
    return f"token {queries[0]} of sequence {rows[0]} sees token {keys[0]}, but not in the model"


def _less_text(less: Array) -> str:
    rows, _, queries, keys = np.nonzero(less)
    if (keys == queries + less.shape[-1] - less.shape[-2]).all():
        return "a token does not see itself"
    return f"token {queries[0]} of sequence {rows[0]} does not see token {keys[0]}, but does in the model"


EPSILONS = ("eps", "variance_epsilon", "epsilon", "layer_norm_eps", "layer_norm_epsilon", "norm_eps")
"""Names of the epsilon in norm modules."""

SCALES = ("scaling", "scale", "inv_norm_factor", "softmax_scale", "scale_attn")
"""Names of the factor of the scores in attention modules."""

TINY = 1e-2  # added numbers smaller than this are epsilons


def epsilon(suspect: Suspect) -> Finding | None:
    """A norm's epsilon, as an attribute or an added number."""
    added = ((node, value) for node, value in suspect.scalars("Add") if 0 <= value < TINY)
    for node, found in (*suspect.attributes("epsilon"), *added):
        wanted = _held(suspect.module(node), EPSILONS)
        if wanted is not None and differ(found, wanted):
            return Finding(difference("epsilon", found, wanted), node)
    return None


def product_factor(suspect: Suspect) -> Finding | None:
    """A matrix product or bias with a factor other than 1."""
    for node, found in suspect.attributes("alpha", "beta"):
        if node.op_type in {"Gemm", "FusedMatMul", "FusedGemm"} and differ(found, 1.0):
            return Finding(difference("factor of the product or of its bias", found, 1.0), node)
    return None


def attention_scale(suspect: Suspect) -> Finding | None:
    """The factor of the attention scores, as an attribute or a multiplied number."""
    for node, found in (*suspect.attributes("scale"), *_score_factors(suspect)):
        module = suspect.module(node)
        wanted, size = _held(module, SCALES), _held(module, ("head_dim",))
        if wanted is None and size:
            wanted = size**-0.5
        if wanted is not None and found and differ(found, wanted):
            return Finding(difference("attention scale", found, wanted), node)
    return None


def _score_factors(suspect: Suspect) -> Iterator[tuple[onnx.NodeProto, float]]:
    for node, value in suspect.scalars("Mul", "Div"):
        makers = [suspect.trace.index.maker.get(name) for name in node.input]
        if any(maker is not None and maker.op_type == "MatMul" for maker in makers) and value:
            yield node, value if node.op_type == "Mul" else 1 / value


def attention_softcap(suspect: Suspect) -> Finding | None:
    """The softcap of attention scores; none without the attribute."""
    wanted = getattr(suspect.config, "attn_logit_softcapping", None) or 0.0
    found = {id(node): value for node, value in suspect.attributes("softcap")}
    for node in suspect.nodes:
        if node.op_type in {"Attention", "GroupQueryAttention"}:
            value = found.get(id(node), 0.0)
            if differ(value, wanted):
                return Finding(difference("attention softcap", value, wanted), node)
    return None


def final_softcap(suspect: Suspect) -> Finding | None:
    """The softcap of the logits, which divides them before the tanh and multiplies them after it."""
    wanted = getattr(suspect.config, "final_logit_softcapping", None)
    if not wanted or not suspect.nodes:
        return None
    for node, found in suspect.scalars("Div", "Mul"):
        if _is_next_to_tanh(suspect, node) and differ(found, wanted) and differ(1 / found, wanted):
            return Finding(difference("final softcap", found, wanted), node)
    return None


def _is_next_to_tanh(suspect: Suspect, node: onnx.NodeProto) -> bool:
    index = suspect.trace.index
    makers = [index.maker.get(name) for name in node.input]
    users = [user for name in node.output for user in index.users[name]]
    return any(other is not None and other.op_type == "Tanh" for other in (*makers, *users))


def sliding_window(suspect: Suspect) -> Finding | None:
    """The window size of sliding layers."""
    wanted = getattr(suspect.config, "sliding_window", None)
    if not wanted:
        return None
    values = suspect.trace.values
    sums = [(node, abs(value), values.get(node.output[0])) for node, value in suspect.scalars("Sub", "Add")]
    counted = [(node, size) for node, size, total in sums if total is not None and total.dtype.kind == "i"]
    for node, found in (*suspect.attributes("local_window_size"), *counted):
        if found > 1 and found not in (wanted, wanted - 1):
            return Finding(difference("sliding window", found, wanted), node)
    return None


def _held(module: Any, names: tuple[str, ...]) -> float | None:
    values = (getattr(module, name, None) for name in names)
    return next(
        (float(value) for value in values if isinstance(value, int | float) and not isinstance(value, bool)), None
    )


CLOSE_POSITIONS = 1e-6
FEW = 4  # number of positions in a text


def rotary_table(suspect: Suspect) -> Finding | None:
    """Constants that differ from a rotary module's frequencies."""
    tables = {
        name.rpartition(".")[0]: buffer.detach().double().numpy().ravel()
        for name, buffer in suspect.replay.model.named_buffers()
        if name.rpartition(".")[2].endswith("inv_freq") and "original" not in name
    }
    for node in suspect.nodes:
        for name in node.input:
            if (found := suspect.constant(name)) is None:
                continue
            near = [table for table in tables.values() if table.size == found.size > 1]
            if near and not any(np.allclose(found.ravel(), table, rtol=CLOSE_POSITIONS, atol=0) for table in near):
                return Finding(_table_text(found.ravel().astype(np.float64), near[0]), node)
    return None


def _table_text(found: Array, wanted: Array) -> str:
    for name, dtype in (("float16", np.float16), ("bfloat16", ml_dtypes.bfloat16)):
        if np.array_equal(found, wanted.astype(np.float32).astype(dtype).astype(np.float64)):
            return f"rotary frequencies rounded to {name} in the graph"
    bases = [_base(table) for table in (found, wanted)]
    if bases[0] and bases[1]:
        return f"rotary base {bases[0]:.6g} in the graph, {bases[1]:.6g} in the model"
    at = int(np.argmax(np.abs(found / wanted - 1)))
    return f"rotary frequency {at} is {found[at]:.6g} in the graph, {wanted[at]:.6g} in the model"


def _base(table: Array) -> float | None:
    """The base of frequencies base^(-2i/d); None if they have another form."""
    if table.size < 3 or (table <= 0).any():
        return None
    exponents = np.arange(table.size) / table.size
    base = float(np.exp(-np.log(table[1:]) @ exponents[1:] / (exponents[1:] @ exponents[1:])))
    return base if np.allclose(table, base**-exponents, rtol=1e-4) else None


def alibi_slopes(suspect: Suspect) -> Finding | None:
    """Constants that differ from the ALiBi slopes, one for each head."""
    heads = getattr(suspect.config, "num_attention_heads", None) or getattr(suspect.config, "n_head", 0)
    for node in suspect.nodes:
        for name in node.input if node.op_type == "Mul" else ():
            found = suspect.constant(name)
            if found is None or found.size != heads or found.dtype.kind != "f":
                continue
            wanted = [r.exact.ravel() for r in suspect.trace.by_place[suspect.scope(node), heads] if r.exact.ndim <= 2]
            wanted = [table for table in wanted if table.dtype.kind == "f" and table[0] > table[-1]]
            if wanted and not any(np.allclose(found.ravel(), table, rtol=CLOSE_POSITIONS) for table in wanted):
                near = min(wanted, key=lambda table: float(np.abs(found.ravel() - table).sum()))
                at = int(np.argmax(np.abs(found.ravel() / near - 1)))
                return Finding(difference(f"ALiBi slope of head {at}", found.ravel()[at], near[at]), node)
    return None


def positions(suspect: Suspect) -> Finding | None:
    """Integers for each token that are not the call's positions."""
    wanted = suspect.replay.call.position_ids
    given = suspect.replay.feeds.get("position_ids", wanted)
    for node in suspect.nodes:
        reads = {"position_ids"} & set(node.input) or any(
            value is not None and value.dtype.kind == "i" and value.size == wanted.size
            for value in (suspect.trace.values.get(name) for name in node.input)
        )
        found = suspect.trace.values.get(node.output[0])
        if not reads or found is None or found.dtype.kind != "i" or found.size != wanted.size:
            continue
        numbers = found.reshape(wanted.shape)
        if not np.array_equal(numbers, given):
            row, first = (int(axis[0]) for axis in np.nonzero(numbers != given))
            few = [", ".join(map(str, table[row, first : first + FEW].tolist())) for table in (numbers, given)]
            text = f"positions {few[0]} in the graph, {few[1]} in the model, from token {first} of sequence {row}"
            return Finding(text, node)
    return None


PRODUCTS = {"Gemm", "MatMul", "FusedMatMul", "FusedGemm", "MatMulNBits"}


def audited(suspect: Suspect) -> Finding | None:
    """A failed weight audit of a tensor that the nodes read."""
    problems = [
        problem
        for check in suspect.checks
        if check.name == "weights" and check.verdict == "fail"
        for problem in check.detail.split("; ")
    ]
    for node in suspect.nodes:
        for problem in problems:
            if set(node.input) & set(re.findall(r"`([^`]+)`", problem)[:1]):
                return Finding(problem, node)
    return None


def other_weight(suspect: Suspect) -> Finding | None:
    """A module that reads the weight of another module."""
    parameters = dict(suspect.replay.model.named_parameters(remove_duplicate=False))
    for node in suspect.nodes:
        own = {name: p for name, p in suspect.module(node).named_parameters(recurse=False)}
        for name in node.input:
            used = parameters.get(name)
            if name not in suspect.weights or used is None or not own or not suspect.scope(node):
                continue
            if not any(used is p or (used.shape == p.shape and torch.equal(used, p)) for p in own.values()):
                wanted = next((key for key, p in own.items() if p.dim() == used.dim()), next(iter(own)))
                return Finding(f"reads `{name}`, the model has `{suspect.scope(node)}.{wanted}` instead", node)
    return None


def transposed(suspect: Suspect) -> Finding | None:
    """A product with a transposed matrix; transformers' Conv1D stores its matrix as (in, out)."""
    for node in suspect.nodes:
        module = suspect.module(node)
        flag = attributes(node).get("transB", 0)
        mapped = len(node.input) > 1 and node.input[1] in suspect.weights
        if node.op_type not in {"Gemm", "FusedMatMul"} or not mapped:
            continue
        rows_out = isinstance(module, torch.nn.Linear)
        if (rows_out or type(module).__name__ == "Conv1D") and bool(flag) != rows_out:
            return Finding(f"`{node.input[1]}` is used transposed", node)
    return None


def missing_bias(suspect: Suspect) -> Finding | None:
    """A module whose bias no node reads."""
    for node in suspect.nodes:
        scope, bias = suspect.scope(node), getattr(suspect.module(node), "bias", None)
        if not scope or not isinstance(bias, torch.Tensor):
            continue
        name = f"{scope}.bias"
        if not any(_adds(other, name, suspect) for other in suspect.trace.index.nodes):
            return Finding(f"no bias in the graph, the model adds `{name}`", node)
    return None


def _adds(node: onnx.NodeProto, name: str, suspect: Suspect) -> bool:
    """Whether a node reads the bias, by its name or by another name in the same module."""
    if name in node.input:
        return True
    return suspect.trace.scopes.of(node) == name.rpartition(".")[0] and any(
        item not in suspect.trace.index.maker and "bias" in item for item in node.input
    )


ATTEMPTS = 60  # maximum number of values that are tried in place of an input


def other_cache(suspect: Suspect) -> Finding | None:
    """A layer that reads the cache of another layer."""
    for node in suspect.nodes:
        own = layer_of_scope(suspect.scope(node))
        for name in node.input:
            layer = layer_of(name)
            if layer is not None and own is not None and layer != own and name in suspect.replay.feeds:
                return Finding(f"reads `{name}`, the cache of layer {layer}", node)
    return None


def missing_term(suspect: Suspect) -> Finding | None:
    """A node that passes on one term of a sum in the model."""
    for node in suspect.nodes:
        if node.op_type == "Identity" and _adds_mask(suspect, node):
            return Finding(f"passes on `{node.input[0]}` only, the model adds to it", node)
    return None


def _adds_mask(suspect: Suspect, node: onnx.NodeProto) -> bool:
    """Whether the model has an addition in the node's module with the size of the value or a multiple of it."""
    value = suspect.trace.values.get(node.output[0])
    places = suspect.trace.by_place.items() if value is not None and value.size else ()
    return any(
        scope == suspect.scope(node) and value is not None and size % value.size == 0 and "add" in record.op
        for (scope, size), records in places
        for record in records
    )


def swapped_inputs(suspect: Suspect) -> Finding | None:
    """A single node that agrees once two of its inputs are exchanged."""
    node = _alone(suspect)
    for first, second in combinations(range(len(node.input)), 2) if node is not None else ():
        names = [node.input[first], node.input[second]] if node is not None else []
        if node is not None and all(names) and _is_right(suspect, node, {first: names[1], second: names[0]}):
            return Finding(f"reads `{names[0]}` and `{names[1]}` in exchanged order", node)
    return None


def other_input(suspect: Suspect) -> Finding | None:
    """A single node that agrees once it reads another value of the same shape, computed nearby."""
    node, values = _alone(suspect), suspect.trace.values
    if node is None:
        return None
    near = _values_near(suspect, node)
    pairs = [
        (place, other)
        for place, name in enumerate(node.input)
        for other in near
        if name in values and other not in node.input and near[other].shape == values[name].shape
    ]
    for place, other in pairs[:ATTEMPTS]:
        if _is_right(suspect, node, {place: other}, near):
            return Finding(f"reads `{node.input[place]}`, but agrees with `{other}` instead", node)
    return None


def _values_near(suspect: Suspect, node: onnx.NodeProto) -> dict[str, Array]:
    """Values computed before the node in its layer or outside the layers, nearest first."""
    index, layer = suspect.trace.index, layer_of_scope(suspect.scope(node))
    before = index.nodes[: index.order[id(node)]]
    made = [n for n in reversed(before) if not index.is_shape(n) and layer_of_scope(suspect.scope(n)) in (layer, None)]
    made.sort(key=lambda n: layer_of_scope(suspect.scope(n)) is None)
    names = [name for n in made for name in n.output if name][: 2 * ATTEMPTS]
    return suspect.replay.probe.read(suspect.replay.feeds, names)


def _alone(suspect: Suspect) -> onnx.NodeProto | None:
    return suspect.nodes[0] if len(suspect.nodes) == 1 else None


def _is_right(
    suspect: Suspect, node: onnx.NodeProto, inputs: Mapping[int, str], more: Mapping[str, Array] | None = None
) -> bool:
    """Whether the node agrees once it reads these inputs instead, whose values may be in `more`."""
    piece = suspect.piece
    if piece is None or piece.expected is None:
        return False
    changed = onnx.NodeProto.FromString(node.SerializeToString())
    changed.input[:] = [inputs.get(place, name) for place, name in enumerate(node.input)]
    values = {**(more or {}), **suspect.replay.feeds, **suspect.trace.values}
    found = suspect.replay.probe.run_piece([changed], values, piece.output)
    return found is not None and suspect.trace.comparison.agrees(piece.expected, found)


def other_output(suspect: Suspect) -> Finding | None:
    """Exchanged names of outputs, with all nodes correct."""
    name = suspect.where.output
    found = suspect.trace.values.get(name)
    if suspect.piece or found is None:
        return None
    for other, record in suspect.replay.outputs().items():
        if other != name and suspect.trace.comparison.agrees(record, found):
            return Finding(f"`{name}` contains the model's `{other}`")
    return None


def optimized(suspect: Suspect) -> Finding | None:
    """A correct graph that onnxruntime's optimization breaks."""
    name = suspect.where.output
    record, found = suspect.replay.outputs().get(name), suspect.trace.values.get(name)
    if suspect.piece or record is None or found is None or not suspect.trace.comparison.agrees(record, found):
        return None
    return Finding("the graph agrees with onnxruntime's graph optimization off: one of its rewrites is wrong here")


def constant(suspect: Suspect) -> Finding | None:
    """The constants of the first node, if other nodes of its operator have different ones."""
    for node in suspect.nodes[:1]:
        numbers = _numbers(suspect, node)
        others = (one for one in suspect.trace.index.nodes if one.op_type == node.op_type and one is not node)
        if numbers and not any(_numbers(suspect, other) == numbers for other in others):
            listed = " and ".join(f"{number:.8g}" for number in numbers)
            return Finding(f"`{node.name}` has the constant{'s' * (len(numbers) > 1)} {listed}", node)
    return None


def _numbers(suspect: Suspect, node: onnx.NodeProto) -> list[float]:
    values = [suspect.constant(name) for name in node.input]
    return [float(v.reshape(())) for v in values if v is not None and v.size == 1 and v.dtype.kind == "f"]


FINDINGS: tuple[Callable[[Suspect], Finding | None], ...] = (
    audited,
    other_weight,
    transposed,
    missing_bias,
    epsilon,
    product_factor,
    attention_scale,
    attention_softcap,
    final_softcap,
    sliding_window,
    mask,
    rotary_table,
    alibi_slopes,
    positions,
    activation,
    other_cache,
    missing_term,
    other_output,
    optimized,
    swapped_inputs,
    other_input,
    constant,
)
"""Each returns a finding, or None if the fault is of another kind."""


def find(suspect: Suspect) -> Finding | None:
    return next((found for row in FINDINGS if (found := row(suspect))), None)
