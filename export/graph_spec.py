"""GraphSpec: how a graph keeps its cache, and which of its axes are fixed numbers.

cache           past and present                     where new keys go
growing         past_sequence_length, total…         after the past (Concat)
shared-buffer   both max_sequence_length, in place   at total_sequence_length - sequence_length
static          both --max-seq-len, in place         at the input `write_indices`, one per row
none            no such inputs and outputs           nowhere: one call is the whole text
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from llmconv.errors import UnsupportedInput, UsageProblem
from llmconv.export.clients import DEFAULT, Client
from llmconv.export.export_options import ExportOptions
from llmconv.export.input_map import Port
from llmconv.progress import say
from llmconv.runtime.extra_inputs import (
    BATCH,
    CACHE_RANK,
    HIDDEN,
    INPUTS_EMBEDS,
    MAX_LENGTH,
    PAST,
    SEQUENCE,
    TOTAL,
    WRITE_INDICES,
    ExtraInput,
    is_past,
    is_recurrent,
    is_token_input,
)

if TYPE_CHECKING:
    from llmconv.export.sentence_modules import SentenceHead, TokenScore

NO_CACHE, FLOAT32 = "none", "float32"


@dataclass(frozen=True)
class GraphSpec:
    """What is fixed about a graph besides the model family; graphs with equal specs share one trace."""

    cache: str = "growing"  # `growing`, `shared-buffer`, `static` or `none`
    batch_size: int | None = None  # number of rows; None leaves the axis dynamic
    slots: int | None = None  # number of tokens that the buffer of the cache holds; None leaves the axis dynamic
    sequence: int | None = None  # number of new tokens per call; None leaves the axis dynamic
    # size of the `inputs_embeds` that the graph takes instead of `input_ids`; None for `input_ids`
    embeddings: int | None = None
    # the provider of onnxruntime that the graph is for, a key of `TARGETS`; None for any runtime
    target: str | None = None
    precision: str = FLOAT32  # dtype of weights, activations and cache
    logits: str = FLOAT32  # dtype of the logits, `float32` or `precision`
    kv_cache: str = ""  # `int8` for keys and values as integer codes, which are added after the trace; empty for floats
    # calls with several new tokens have one row only, which lets `GroupQueryAttention` rotate its inputs
    steps: bool = False
    hidden: int = 0  # size of the hidden state that it also returns, for an MTP head; 0 if it does not
    # names of extra inputs that the graph does not have, because they always have their default
    fixed_inputs: tuple[str, ...] = ()
    # what a graph without a cache returns, a key of `tracing.single_pass.RESULTS`, or `mtp` for an MTP head; empty for
    # logits
    task: str = ""
    head: SentenceHead | TokenScore | None = None  # what follows the decoder for that task; None for nothing

    @property
    def opset(self) -> int:
        """Version of the standard operators: `TensorScatter` came with 24."""
        return 23 if self.cache in ("growing", NO_CACHE) else 24

    def manifest_fields(self) -> dict[str, Any]:
        dtypes = {"precision": self.precision, "logits_dtype": self.logits}
        others = {"embeddings", "precision", "logits", "fixed_inputs", "head", "hidden", "task" if self.hidden else ""}
        fixed = {name: value for name, value in asdict(self).items() if value and name not in others}
        fields: dict[str, Any] = {name: dtype for name, dtype in dtypes.items() if dtype != FLOAT32}
        fields |= {"fixed_inputs": list(self.fixed_inputs)} if self.fixed_inputs else {}
        return {**fields, "form": fixed} if fixed != {"cache": "growing"} else fields

    def inputs(self, ports: Sequence[Port]) -> tuple[Port, ...]:
        """Inputs of a graph with this spec; `write_indices` of a static cache comes after tokens, mask and positions.

        `ports` are the inputs of the family's graph with a growing cache. Raises UnsupportedInput: the family keeps
        states, which buffers cannot hold, or has an input of past tokens alone.
        """
        if self.cache == NO_CACHE:  # for a task the graph counts positions from the mask itself
            own = [port for port in ports if is_token_input(port.name, len(port.axes))]
            own = [port for port in own if not (self.task and port.name == "position_ids")]
            axes = [tuple(SEQUENCE if axis == TOTAL else axis for axis in port.axes) for port in own]
            return tuple(self._fixed(replace(port, axes=one)) for port, one in zip(own, axes, strict=True))
        past = [port.name for port in ports if not is_past(port.name) and PAST in port.axes]
        if self.cache != "growing" and past:
            raise UnsupportedInput(
                f"a cache of fixed length has no number of past tokens, which is an axis of the input `{past[0]}`",
                hint="leave out `--shapes static` and `--cache shared-buffer`",
            )
        ports = [port for port in ports if port.name not in self.fixed_inputs]
        if self.cache != "growing" and any(port.name.startswith("past_") and PAST not in port.axes for port in ports):
            raise UnsupportedInput(
                "a cache of fixed length holds only keys and values, and this family also keeps states",
                hint="leave out `--shapes static` and `--cache shared-buffer`",
            )
        if self.cache == "static" and all(port.name != "position_ids" for port in ports):
            raise UnsupportedInput(
                "this family counts tokens itself, and the rows of a static cache may have different lengths",
                hint="leave out `--shapes static`; `--cache shared-buffer` supports this family",
            )
        if self.embeddings:
            tokens = Port(INPUTS_EMBEDS, self.precision, (BATCH, SEQUENCE, self.embeddings))
            ports = [tokens if port.name == "input_ids" else port for port in ports]
        fixed = [self._fixed(port) for port in ports]
        if self.cache != "static":
            return tuple(fixed)
        first = sum(is_token_input(port.name, len(port.axes)) for port in fixed)
        batch = self.batch_size or BATCH
        return (*fixed[:first], Port(WRITE_INDICES, "int64", (batch,)), *fixed[first:])

    def outputs(self, ports: Sequence[Port]) -> tuple[Port, ...]:
        """Outputs of a graph with this spec; `ports` are those of the family's graph with a growing cache."""
        if self.cache == NO_CACHE:
            ports = [port for port in ports if not port.name.startswith("present")]
        if self.hidden:
            ports = [ports[0], Port(HIDDEN, FLOAT32, (BATCH, SEQUENCE, self.hidden)), *ports[1:]]
        return tuple(self._fixed(port) for port in ports)

    def _fixed(self, port: Port) -> Port:
        sizes: dict[str | int, str | int] = {BATCH: self.batch_size or BATCH, SEQUENCE: self.sequence or SEQUENCE}
        slots = self.slots or MAX_LENGTH
        if self.cache == "static":
            sizes |= {PAST: slots, TOTAL: slots}
        elif self.cache == "shared-buffer":
            sizes |= {PAST: slots, TOTAL: slots if len(port.axes) == CACHE_RANK else TOTAL}
        axes, dtype = tuple(sizes.get(axis, axis) for axis in port.axes), port.dtype
        if dtype == FLOAT32 and not is_recurrent(port.name):  # which transformers keeps in float32 in every model
            dtype = self.logits if port.name == "logits" else self.precision
        return replace(port, axes=axes, dtype=dtype)


GROWING = GraphSpec()
MAX_PROMPT_LEN = 128  # default limit of the tokens per call of a static prefill graph


def graph_specs(
    roles: Sequence[str], given: ExportOptions, embeddings: int | None = None, *, quantized: bool = False
) -> dict[str, GraphSpec]:
    """The spec of every graph; a static decode graph takes one token, a static unified graph any number.

    `embeddings` is the size of those that the graphs take instead of tokens. `quantized` weights are codes, which a
    session packs, so both graphs should be one and share it. Raises UsageProblem: options that contradict each other.
    """
    cache, target, kv_cache = given["cache"] or "growing", given["target"], given["kv_cache"] or ""
    dtypes = given["precision"] or FLOAT32, given["logits_dtype"]
    spec = GraphSpec(cache, None, None, None, embeddings, target, *dtypes, kv_cache)
    if given["shapes"] == "static":
        if cache != "growing":
            raise UsageProblem("static graphs have a cache of their own kind", hint=f"leave out `--cache {cache}`")
        slots = given["max_seq_len"]
        spec = replace(spec, cache="static", batch_size=given["batch_size"] or 1, slots=slots)
        sequences = {"prefill": _prompt_length(slots, given["prompt_len"]), "decode": 1, "unified": None}
        return {role: replace(spec, sequence=sequences[role]) for role in roles}
    fixed = {name: given[name] for name in ("batch_size", "max_seq_len", "prompt_len")}
    if name := next((name for name, size in fixed.items() if size), ""):
        option = f"--{name.replace('_', '-')}"
        raise UsageProblem(f"`{option}` applies to static graphs only", hint="add `--shapes static`, or leave it out")
    # keys that the operator rotates itself could not be compared with codes
    rotates = cache == "shared-buffer" and target == "ort-cpu" and not (kv_cache or quantized)
    step = replace(spec, steps=rotates)
    return {role: step if role == "decode" else spec for role in roles}


def _prompt_length(slots: int | None, asked: int | None) -> int:
    if not slots:
        raise UsageProblem("`--shapes static` needs the length of the cache", hint="add `--max-seq-len S`")
    length = asked or max(divisor for divisor in range(1, MAX_PROMPT_LEN + 1) if slots % divisor == 0)
    if slots % length:
        raise UsageProblem(
            f"a cache of {slots} tokens cannot be filled by calls of {length} tokens",
            hint="make `--max-seq-len` a multiple of `--prompt-len`",
        )
    return length


def all_fixed(extras: Mapping[str, ExtraInput], what: str, without: str) -> tuple[str, ...]:
    """The names of all extra inputs, for graphs that take none of them.

    A message says that `what` cannot feed them, and to leave out the option `without`. Raises UnsupportedInput: an
    input has no constant default.
    """
    for name, extra in extras.items():
        if callable(extra.default):
            raise UnsupportedInput(
                f"{what} cannot feed the input `{name}`, which has another value in each call",
                hint=f"leave out `{without}`",
            )
    return tuple(extras)


def with_fixed_inputs(
    specs: Mapping[str, GraphSpec], extras: Mapping[str, ExtraInput], clients: Sequence[Client]
) -> dict[str, GraphSpec]:
    """The specs, by role, that all clients can feed; UnsupportedInput for an input without a constant default.

    Graphs with a cache of fixed length run a prompt in several calls, so an input of a whole call is refused, too.
    """
    fixed_length = any(spec.cache != GROWING.cache for spec in specs.values())
    for name, extra in extras.items() if fixed_length else ():
        if SEQUENCE not in extra.axes and (TOTAL in extra.axes or callable(extra.default)):
            raise UnsupportedInput(
                f"a cache of fixed length runs prompts in parts, and the input `{name}` has another value in each part",
                hint="leave out `--shapes static` and `--cache shared-buffer`",
            )
    others = [client.name for client in clients if client.name != DEFAULT]
    if not extras or not others:
        return dict(specs)
    fixed = all_fixed(extras, f"layout `{others[0]}`", f"--layout {others[0]}")
    for name in fixed:
        say(f"`{name}` is always {extras[name].default}: layout `{others[0]}` does not feed it")
    return {role: replace(spec, fixed_inputs=fixed) for role, spec in specs.items()}


def refuse_option(extras: Mapping[str, ExtraInput], option: str) -> None:
    """Raises UnsupportedInput if the model has extra inputs, whose graphs do not have this option."""
    if extras:
        raise UnsupportedInput(
            f"`{option}` does not support the input `{next(iter(extras))}` of this family",
            hint=f"leave out `{option}`, or the input in its row of the input map",
        )
