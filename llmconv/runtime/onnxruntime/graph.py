"""The graphs of a folder in onnxruntime, whole or in stages: of a decoder, of one pass, of embeddings, of images."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from llmconv.errors import InputRefused, LlmconvError, MalformedInput, UnsupportedInput, first_line
from llmconv.memory import huge_pages, raise_if_out_of_memory
from llmconv.output.manifest import EMBEDDINGS, VISION, VISION_ROLE, GraphEntry, read_manifest
from llmconv.runtime.extra_inputs import (
    HIDDEN,
    IMAGE_FEATURES,
    INPUTS_EMBEDS,
    LOGITS_FROM,
    PIXEL_VALUES,
    SYMBOLS,
    ExtraInput,
    ExtraValues,
    ModelCall,
    is_factor,
    is_past,
    is_present,
    is_state,
    is_token_input,
)
from llmconv.runtime.onnxruntime.guard import external_fields, external_tensors, load_guarded, nodes, weight_bytes
from llmconv.runtime.onnxruntime.packed_cache import (
    is_packed,
    join_projections,
    open_changed,
    open_kept,
    packed_graph,
)
from llmconv.runtime.onnxruntime.session_settings import (
    HOST,
    INPUT_DTYPES,
    TENSOR_DTYPES,
    Device,
    SessionSettings,
    as_array,
    for_concurrent_use,
)
from llmconv.runtime.onnxruntime.shared_buffers import BufferedSession, FixedSizes, as_input, joined
from llmconv.runtime.onnxruntime.time_limit import TOO_LONG, LimitedSession, TimeLimit
from llmconv.runtime.runner import Cache, Choices, Extras, PlacedEmbeddings, Step, default_positions
from llmconv.tensors import BY_NAME, Array


class SessionChain:
    """The sessions of a graph's stages, in order; one session for a graph in one file.

    `op_types` are the graph's operators; with `joins` and `settings.prepack`, projections are joined before they are
    packed. Raises MalformedInput if `guard` or onnxruntime refuses a file, UsageProblem for settings of a stage that
    does not exist.
    """

    def __init__(self, paths: Sequence[Path], settings: SessionSettings, *, joins: bool = True) -> None:
        settings.require_stages(len(paths))
        every = [settings.of_stage(number) for number in range(1, len(paths) + 1)]
        models = [load_guarded(path) for path in paths]
        limits = [TimeLimit(weight_bytes(model), settings.timeout) for model in models]
        opened = zip(paths, models, every, limits, strict=True)
        self._devices = [one.device for one in every]
        self._sessions = [_open(path, model, own, limit, joins) for path, model, own, limit in opened]
        self.op_types = {node.op_type for model in models for node in nodes(model)}
        self._results = self.get_outputs()
        self._names = [  # onnxruntime builds these lists anew for every request
            ([arg.name for arg in session.get_inputs()], [arg.name for arg in session.get_outputs()])
            for session in self._sessions
        ]
        self._defaults = [[arg.name for arg in session.get_overridable_initializers()] for session in self._sessions]

    @property
    def last(self) -> LimitedSession:
        """The last session, the only one of a graph in one file."""
        return self._sessions[-1]

    def device_of(self, name: str) -> Device:
        """The device of the first session that reads the input `name`."""
        found = (device for device, (inputs, _) in zip(self._devices, self._names, strict=True) if name in inputs)
        return next(found, self._devices[0])

    def get_inputs(self) -> list[Any]:
        return outer_inputs([(session.get_inputs(), session.get_outputs()) for session in self._sessions])

    def get_outputs(self) -> list[Any]:
        return outer_outputs([(session.get_inputs(), session.get_outputs()) for session in self._sessions])

    def get_factors(self) -> list[Any]:
        """The declared inputs for LoRA factors, which have a default."""
        optional = (arg for session in self._sessions for arg in session.get_overridable_initializers())
        return [arg for arg in optional if is_factor(arg.name)]

    @property
    def takes_start(self) -> bool:
        """Whether a call may say from which token on it reads logits, see `LOGITS_FROM`."""
        return any(LOGITS_FROM in names for names in self._defaults)

    def run_with_ort_values(self, names: Sequence[str], feeds: Mapping[str, ort.OrtValue]) -> list[ort.OrtValue]:
        """The values of the outputs `names` of any session; `feeds` are all inputs by name; some have a default.

        The results lie in the host's memory; the cache stays on the device of its stage, and so does what one session
        passes to the next if all have the same device.
        """
        values = dict(feeds)
        every = zip(self._sessions, self._devices, self._names, self._defaults, strict=True)
        for session, device, (inputs, outputs), defaults in every:
            feeds = {name: values[name] for name in (*inputs, *(name for name in defaults if name in values))}
            made = (
                session.run_with_ort_values(outputs, feeds)
                if device.memory == HOST
                else session.run_on_device(self._places(outputs, device), feeds, device.index)
            )
            values.update(zip(outputs, made, strict=True))
        return [values[name] for name in names]

    def _places(self, outputs: Sequence[str], device: Device) -> dict[str, str]:
        """The memory of each output."""
        results = {arg.name for arg in self._results if not is_present(arg.name)}
        passed = len(set(self._devices)) > 1  # through the host
        return {
            name: HOST if name in results or (passed and not is_present(name)) else device.memory for name in outputs
        }


Stages = Sequence[tuple[Sequence[Any], Sequence[Any]]]  # the declared inputs and outputs of each stage of a graph


def outer_inputs(stages: Stages) -> list[Any]:
    """The declared inputs that no earlier stage computes, each once: the cache last."""
    produced: set[str] = set()
    inputs: dict[str, Any] = {}
    for taken, made in stages:
        inputs |= {arg.name: arg for arg in taken if arg.name not in produced | inputs.keys()}
        produced |= {arg.name for arg in made}
    return sorted(inputs.values(), key=lambda arg: is_past(arg.name))


def outer_outputs(stages: Stages) -> list[Any]:
    """The declared outputs that no stage reads: the results first, then the cache."""
    read = {arg.name for taken, _ in stages for arg in taken}
    outputs = [arg for _, made in stages for arg in made if arg.name not in read]
    return sorted(outputs, key=lambda arg: arg.name.startswith("present"))


def _open(
    path: Path, model: onnx.ModelProto, settings: SessionSettings, limit: TimeLimit, joins: bool
) -> LimitedSession:
    joins = joins and (settings.prepack or settings.packed_cache is not None)
    if settings.packed_cache or is_packed(model):
        settings = replace(settings, prepack=True)
    settings.start()
    try:
        return _session(path, model, settings, limit, joins)
    except LlmconvError:
        raise
    except TimeoutError as error:
        raise MalformedInput(f"`{path.name}` cannot be opened: {error}", hint=TOO_LONG) from error
    except Exception as error:  # onnxruntime's exceptions share no base class of their own
        raise_if_out_of_memory(error, f"while `{path.name}` was opened")
        problem = f"onnxruntime cannot open `{path.name}`: {first_line(error)}"
        raise MalformedInput(problem, hint="run `llmconv export` again") from error


def _session(
    path: Path, model: onnx.ModelProto, settings: SessionSettings, limit: TimeLimit, joins: bool
) -> LimitedSession:
    options, providers = settings.options(), settings.providers()
    changed = settings.prepare(path, model, options)
    if joins and options.graph_optimization_level != ort.GraphOptimizationLevel.ORT_DISABLE_ALL:
        join_projections(model.graph)  # onnxruntime joins the matrices when it folds constants
    if settings.packed_cache and (packed := packed_graph(path, model, settings, limit)):
        try:
            return open_kept(packed, settings, limit)
        except Exception:  # a damaged file; onnxruntime's exceptions share no base class of their own
            shutil.rmtree(packed.parent, ignore_errors=True)
    if joins:
        size = sum(int(external_fields(tensor).get("length", 0)) for tensor in external_tensors(model))
        with huge_pages(size):  # the session packs its own copy of the weights
            return open_changed(path, model, options, providers, limit)
    if changed:
        return open_changed(path, model, options, providers, limit)
    return LimitedSession(path, options, providers, limit)


VERIFY = "run `llmconv verify` on the folder"
STATUS = "Status Message: "  # precedes the relevant part of onnxruntime's errors


@contextmanager
def refusing(name: str, hint: str = VERIFY, kind: type[InputRefused] = MalformedInput) -> Iterator[None]:
    """Context in which a graph runs; its errors are those of llmconv, of this kind if onnxruntime cannot run it."""
    try:
        yield
    except LlmconvError:
        raise
    except TimeoutError as error:
        raise MalformedInput(f"`{name}` cannot be run: {error}", hint=TOO_LONG) from error
    except Exception as error:  # onnxruntime's exceptions share no base class of their own
        raise_if_out_of_memory(error, f"in `{name}`")
        reason = str(error).rpartition(STATUS)[2].partition("\n")[0].strip() or first_line(error)
        raise kind(f"`{name}` fails in onnxruntime: {reason}", hint=hint) from error


@dataclass(frozen=True)
class OrtCache:
    """A cache as OrtValues, one per name of the graph's outputs; `length` counts tokens, padding included."""

    names: Sequence[str]
    values: Sequence[ort.OrtValue]
    length: int

    def arrays(self) -> dict[str, Array]:
        return {name: as_array(value) for name, value in zip(self.names, self.values, strict=True)}


COARSE = {  # operators that round activations to integers
    *("MatMulNBits", "MatMulInteger", "MatMulIntegerToFloat", "DynamicQuantizeLinear", "DynamicQuantizeMatMul"),
    *("QuantizeLinear", "QLinearMatMul", "QMoE"),
}
LENGTH_AXIS = 2  # the token axis of keys and values
INT8 = "tensor(int8)"  # onnxruntime's type of codes, of which a cache may consist


class OrtGraph:
    """One graph in one session, or in one session per stage.

    `path` is its file, or the file of its first stage; `entry` that in the manifest, if it has one. Raises
    MalformedInput: the file is refused, see `guard`, or onnxruntime cannot open it.
    """

    def __init__(self, path: Path, settings: SessionSettings | None = None, *, entry: GraphEntry | None = None) -> None:
        entry = entry or GraphEntry("", (path.name,))
        settings = settings or SessionSettings()
        settings = replace(settings, yields=settings.yields or len(entry.files) > 1)
        fixed = ", ".join(f"{name} = {size}" for name, size in settings.free_dimensions.items())
        self._hint = f"free dimensions are fixed to {fixed}: leave that out of the session options" if fixed else VERIFY
        self._device = settings.device
        self._session = self._connect(entry.paths(path.parent), settings)
        declared, results = self._session.get_inputs(), self._session.get_outputs()
        # declared shapes (sizes and symbols) by name, in the graph's order
        self.inputs: dict[str, list[int | str]] = {arg.name: arg.shape for arg in declared}
        self.outputs: dict[str, list[int | str]] = {arg.name: arg.shape for arg in results}
        self.types: dict[str, str] = {arg.name: arg.type for arg in [*declared, *results]}
        self.lora_inputs: dict[str, list[int | str]] = {arg.name: arg.shape for arg in self._session.get_factors()}
        self._factors: dict[str, ort.OrtValue] = {}
        self.past_names = [arg.name for arg in declared if is_past(arg.name)]
        self.present_names = [arg.name for arg in results if is_present(arg.name)]
        self._grows = [at for at, name in enumerate(self.present_names) if not is_state(name)]
        self.result_names = ["logits"] if "logits" in self.outputs else ["tokens", "scores"]
        self.result_names += [HIDDEN] if HIDDEN in self.outputs else []
        self.takes_positions = "position_ids" in self.inputs
        # as the input map declares them
        self.extra_inputs = declared_extras(self.inputs, self.types, settings.extra_inputs)
        self._dtypes = {name: INPUT_DTYPES.get(self.types[name]) for name in self.inputs}
        kinds = [np.dtype(TENSOR_DTYPES[it]) for it in self.types.values() if it in TENSOR_DTYPES and it != INT8]
        # the narrowest float type of inputs and outputs, in which it computes
        self.dtype: np.dtype[Any] = min(kinds, key=lambda kind: kind.itemsize, default=np.dtype(np.float32))
        self._table = None  # the embedding of a graph that takes embeddings
        if INPUTS_EMBEDS in self.inputs:
            self._table = EmbeddingGraph(path.with_name(EMBEDDINGS), for_concurrent_use(settings))
        self._garbage = settings.garbage
        self._widened = settings.widened  # the sessions read its memory
        self._set_entry(entry)

    def _set_entry(self, entry: GraphEntry) -> None:
        """Sets what depends on the entry in the manifest."""
        self.entry, self.name = entry, entry.name
        single = "GroupQueryAttention" in self._session.op_types
        # None if the cache grows
        self.sizes = FixedSizes.of(self.inputs, self.outputs, single, steps=entry.role == "decode")
        self._buffered = None
        if self.sizes:
            memory = self._garbage, self._device, self._factors
            embed = partial(_token_input, self._table)  # a method would keep the sessions in a cycle
            given = self._session.last, self.sizes, self.result_names, embed, *memory
            self._buffered = BufferedSession(*given, takes_start=self.takes_start)

    def under(self, entry: GraphEntry) -> OrtGraph:
        """The same sessions, and so the same memory, as the graph of another entry with the same content."""
        other = copy(self)
        other._set_entry(entry)
        return other

    def with_factors(self, factors: Mapping[str, Array]) -> OrtGraph:
        """The same sessions, and so the same memory, with LoRA factors; names and shapes are checked by the runner."""
        other = copy(self)
        other._factors = {name: self._device.place(array) for name, array in factors.items()}
        other._set_entry(self.entry)
        return other

    def _connect(self, paths: Sequence[Path], settings: SessionSettings) -> Any:
        return SessionChain(paths, settings)

    @property
    def takes_start(self) -> bool:
        """Whether a call may ask for the last logits alone, see `LOGITS_FROM`."""
        return bool(self._session.takes_start)

    @property
    def scores_last(self) -> bool:
        """Whether it returns logits of the last position only, or one choice without the next likeliest."""
        return bool(self.entry.last_logits) or ("logits" not in self.outputs and len(self.outputs["tokens"]) < 3)

    @property
    def rounds_activations(self) -> bool:
        """Whether it computes in less than float32, so that the last bit of a value may become a much larger step."""
        return self.dtype != np.float32 or bool(self._session.op_types & COARSE)

    @property
    def scales_batches(self) -> bool:
        """Whether it rounds all activations of a call by one scale."""
        return bool(self._session.op_types & {"DynamicQuantizeLinear", "DynamicQuantizeMatMul"})

    @property
    def is_on_host(self) -> bool:
        return self._device.memory == HOST

    @property
    def embedding_size(self) -> int | None:
        """Size of `inputs_embeds`; None if the graph takes `input_ids`."""
        return int(self.inputs[INPUTS_EMBEDS][-1]) if self._table else None

    def embed(self, input_ids: Array, placed: PlacedEmbeddings | None = None) -> dict[str, Array]:
        """`input_ids`, int64 [batch, tokens], or `inputs_embeds` with the `placed` ones, by name of the input."""
        return _token_input(self._table, input_ids, placed)

    def run(
        self,
        input_ids: Array,
        attention_mask: Array,
        position_ids: Array,
        past: Cache | None = None,
        extras: Extras | None = None,
        placed: PlacedEmbeddings | None = None,
    ) -> Step:
        """Continues `past` by `input_ids`; arguments as in `Runner.prefill`.

        Raises MalformedInput if onnxruntime cannot run the graph on them; UnsupportedInput for an input of no input
        map, or a hook of another shape or dtype; UsageProblem for a value of no extra input, or of another shape or
        dtype.
        """
        return self.run_call(ModelCall(input_ids, attention_mask, position_ids), past, extras, placed)

    def run_call(
        self, call: ModelCall, past: Cache | None, extras: Extras | None, placed: PlacedEmbeddings | None = None
    ) -> Step:
        values = self.extra_values(extras)
        with refusing(self.name, self._hint):
            results, present = (
                self._buffered.run(call, values, past, placed)
                if self._buffered
                else self._run_parts(call, values, past, placed)
            )
        return step_of(self.result_names, results, present)

    def extra_values(self, extras: Extras | None) -> ExtraValues:
        """All extra inputs' values; UnsupportedInput for an input of no input map, UsageProblem for a value of none."""
        require_known(self.inputs, self.extra_inputs, self.name)
        return ExtraValues(self.extra_inputs, extras or {})

    def _run_parts(
        self, call: ModelCall, values: ExtraValues, past: Cache | None, placed: PlacedEmbeddings | None
    ) -> tuple[list[Array], Cache]:
        """Runs a graph whose present is its past plus the new tokens, a long prompt in parts."""
        new, width = call.input_ids.shape[1], call.width(values)
        before, pieces = call.attention_mask.shape[1] - new, []
        for start in range(0, new, width):
            at = slice(start, min(start + width, new))
            piece = call
            if width < new:
                mask = call.attention_mask[:, : before + at.stop]
                piece = ModelCall(call.input_ids[:, at], mask, call.position_ids[:, at], call.last_only)
            given = {**piece.named, **self.embed(piece.input_ids, placed), **values.of(piece, call, start)}
            results, past = self._run_growing(given, past, last_only=call.last_only)
            pieces.append(results)
        assert past is not None
        return joined(self.result_names, pieces, last=call.last_only), past

    def _run_growing(
        self, given: dict[str, Array], past: Cache | None, *, last_only: bool = False
    ) -> tuple[list[Array], Cache]:
        """Runs a graph whose present is its past plus the new tokens."""
        feeds = {name: as_input(array, self._dtypes[name]) for name, array in given.items() if name in self.inputs}
        feeds |= self._factors
        if self.takes_start and last_only:
            feeds[LOGITS_FROM] = as_input(np.array([-1]))
        feeds |= zip(self.past_names, self._past_values(past, len(next(iter(given.values())))), strict=False)
        outputs = self._session.run_with_ort_values([*self.result_names, *self.present_names], feeds)
        results = [as_array(value) for value in outputs[: len(self.result_names)]]
        present = outputs[len(self.result_names) :]
        lengths = [present[at].shape()[LENGTH_AXIS] for at in self._grows]
        return results, OrtCache(self.present_names, present, max(lengths, default=given["attention_mask"].shape[1]))

    def _past_values(self, past: Cache | None, batch: int) -> Sequence[ort.OrtValue]:
        if past is None:
            return [self._empty(name, batch) for name in self.past_names]
        if isinstance(past, OrtCache):
            return past.values
        arrays = past.arrays()
        dtypes = [TENSOR_DTYPES.get(self.types[name], np.float32) for name in self.past_names]
        typed = [array.astype(dtype, copy=False) for array, dtype in zip(arrays.values(), dtypes, strict=True)]
        return [self._session.device_of(name).place(array) for name, array in zip(self.past_names, typed, strict=True)]

    def _empty(self, name: str, batch: int) -> ort.OrtValue:
        """Keys or values of no tokens, or a state of zeros.

        Symbols other than the length stand for heads and head size with `--layout optimum`; such a graph reshapes an
        empty past itself.
        """
        shape = [axis if isinstance(axis, int) else int(at != LENGTH_AXIS) for at, axis in enumerate(self.inputs[name])]
        dtype = TENSOR_DTYPES.get(self.types[name], np.float32)
        return self._session.device_of(name).place(np.zeros([batch, *shape[1:]], dtype))


def _token_input(table: EmbeddingGraph | None, input_ids: Array, placed: PlacedEmbeddings | None) -> dict[str, Array]:
    if table is None:
        return {"input_ids": input_ids}
    embedded = table.run(input_ids)
    return {INPUTS_EMBEDS: placed.into(embedded) if placed else embedded}


def step_of(names: Sequence[str], results: Sequence[Array], present: Cache) -> Step:
    """The outputs of a graph, `logits` (and the hidden state) or `tokens` and `scores`, and its cache as a step."""
    if names[0] == "logits":
        return Step(results[0], present, hidden=results[1] if HIDDEN in names else None)
    # `argmax` returns [batch, new tokens]
    tokens, scores = (array if array.ndim == 3 else array[..., None] for array in results)
    return Step(np.empty((*tokens.shape[:2], 0), np.float32), present, Choices(tokens, scores))


def open_graph(folder: Path, entry: GraphEntry, settings: SessionSettings | None = None) -> OrtGraph:
    return OrtGraph(folder / entry.files[0], settings, entry=entry)


UNKNOWN = 1 << 31  # number of valid values where only the config class knows it; the graph itself refuses larger ones
INSTALL = "install the package whose input map declares it, or call `register_input_map`"


def extra_names(shapes: Mapping[str, Sequence[int | str]]) -> list[str]:
    """The names of a graph's inputs other than tokens, mask, one position for each token, and cache."""
    return [name for name, shape in shapes.items() if not is_token_input(name, len(shape)) and not is_past(name)]


def declared_extras(
    shapes: Mapping[str, Sequence[int | str]],
    types: Mapping[str, str],
    known: Callable[[], Sequence[ExtraInput]] | None,
) -> dict[str, ExtraInput]:
    """The extra inputs of a graph by name, from declared shapes and onnxruntime's type names of all inputs.

    An input of no input map is left out; `known` returns the extra inputs of the family. Raises UnsupportedInput if
    rank, size or dtype are not those of the input map.
    """
    names = extra_names(shapes)
    rows = {extra.name: extra for extra in known()} if names and known else {}
    return {name: _declared(rows[name], shapes[name], types[name]) for name in names if name in rows}


def _declared(extra: ExtraInput, shape: Sequence[int | str], kind: str) -> ExtraInput:
    wanted = BY_NAME[extra.dtype].numpy
    found = INPUT_DTYPES.get(kind)
    same_dtype = found is not None and (found == wanted.type or (wanted.kind == "f" and kind != "tensor(double)"))
    sizes = zip(extra.axes, shape, strict=False)
    same_sizes = all(axis in SYMBOLS or axis == size or not isinstance(axis, int) for axis, size in sizes)
    if len(shape) != len(extra.axes) or not same_dtype or not same_sizes:
        raise UnsupportedInput(
            f"the graph's input `{extra.name}` is {kind} {list(shape)}, and the input map declares {extra.dtype} "
            f"{[axis if isinstance(axis, str | int) else '…' for axis in extra.axes]}",
            hint="run `llmconv export` again",
        )
    axes = tuple(axis if axis in SYMBOLS else size for axis, size in zip(extra.axes, shape, strict=True))
    known = extra.values is None or isinstance(extra.values, int | float)
    return replace(extra, axes=axes, values=extra.values if known else UNKNOWN)


def require_known(shapes: Mapping[str, Sequence[int | str]], known: Mapping[str, ExtraInput], what: str) -> None:
    """Raises UnsupportedInput, with the name, for a graph (`what`) with an input whose value nothing computes."""
    if unknown := [name for name in extra_names(shapes) if name not in known]:
        raise UnsupportedInput(f"`{what}` has the input `{unknown[0]}`, which no input map declares", hint=INSTALL)


class EmbeddingGraph:
    """Maps `input_ids` to `inputs_embeds`; raises MalformedInput if `guard` or onnxruntime refuses the file."""

    def __init__(self, path: Path, settings: SessionSettings | None = None) -> None:
        self._session = SessionChain([path], settings or SessionSettings(), joins=False).last

    def run(self, input_ids: Array) -> Array:
        """Embeddings, float [batch, tokens, hidden], of `input_ids` int64 [batch, tokens]."""
        ids = np.ascontiguousarray(input_ids, dtype=np.int64)
        (embedded,) = self._session.run_with_ort_values([INPUTS_EMBEDS], {"input_ids": as_input(ids)})
        return as_array(embedded)


class SinglePassGraph:
    """One graph without a cache; `inputs` and `outputs` are declared shapes by name; raises MalformedInput."""

    def __init__(self, path: Path, settings: SessionSettings | None = None) -> None:
        self._session = SessionChain([path], settings or SessionSettings(), joins=False)
        self.inputs: dict[str, list[int | str]] = {arg.name: arg.shape for arg in self._session.get_inputs()}
        self.outputs: dict[str, list[int | str]] = {arg.name: arg.shape for arg in self._session.get_outputs()}
        self._path = path

    def run(self, input_ids: Array, attention_mask: Array, position_ids: Array | None = None) -> Mapping[str, Array]:
        """All outputs by name for int64 [batch, tokens]; positions None: counted from the mask; raises InputRefused."""
        given = {"input_ids": input_ids, "attention_mask": attention_mask}
        if "position_ids" in self.inputs:
            given["position_ids"] = (
                default_positions(attention_mask, input_ids.shape[1]) if position_ids is None else position_ids
            )
        feeds = {name: as_input(np.ascontiguousarray(array, dtype=np.int64)) for name, array in given.items()}
        hint = "are the tokens of this model's tokenizer, and no more than its context length?"
        with refusing(self._path.name, hint, InputRefused):
            values = self._session.run_with_ort_values(list(self.outputs), feeds)
        return {name: as_array(value) for name, value in zip(self.outputs, values, strict=True)}


def has_vision(folder: Path) -> bool:
    """Whether the manifest of a folder lists the graph of a vision tower, or the folder has one and no manifest."""
    listed = read_manifest(folder).graphs
    return VISION_ROLE in listed if listed else (folder / VISION).is_file()


class VisionGraph:
    """Maps `pixel_values`, and in some families their sizes, to `image_features`.

    `shape` is that of `pixel_values` as declared, [images, channels, height, width] for images of one size; `tokens`
    the number of features of one image, 0 if that depends on the image. Raises MalformedInput for another kind of
    graph, or if `guard` or onnxruntime refuses it.
    """

    def __init__(self, path: Path, settings: SessionSettings | None = None) -> None:
        self._session = SessionChain([path], settings or SessionSettings(), joins=False).last
        self._inputs = {arg.name: arg for arg in self._session.get_inputs()}
        outputs = {arg.name: arg for arg in self._session.get_outputs()}
        if PIXEL_VALUES not in self._inputs or IMAGE_FEATURES not in outputs:
            problem = f"`{path.name}` is not a graph of `{PIXEL_VALUES}` to `{IMAGE_FEATURES}`"
            raise MalformedInput(problem, hint="run `llmconv export` again")
        self.shape: tuple[int | str, ...] = tuple(self._inputs[PIXEL_VALUES].shape)
        declared = outputs[IMAGE_FEATURES].shape
        self.tokens = int(declared[1]) if len(declared) == 3 and isinstance(declared[1], int) else 0
        self._name, self._results = path.name, list(outputs)

    def run(self, given: Mapping[str, Array]) -> dict[str, Array]:
        """Outputs by name, floats cast to the graph's dtype; InputRefused for other shapes, MalformedInput."""
        if given.keys() != self._inputs.keys():
            problem = f"`{self._name}` takes {', '.join(self._inputs)}, and not {', '.join(given)}"
            raise MalformedInput(problem, hint="run `llmconv export` again")
        feeds = {name: as_input(self._fitted(name, array)) for name, array in given.items()}
        with refusing(self._name):
            results = self._session.run_with_ort_values(self._results, feeds)
        return {name: as_array(value) for name, value in zip(self._results, results, strict=True)}

    def _fitted(self, name: str, array: Array) -> Array:
        """An input in the graph's dtype, its shape checked."""
        declared = self._inputs[name]
        axes = list(zip(declared.shape, array.shape, strict=False))
        if array.ndim != len(declared.shape) or any(isinstance(axis, int) and axis != size for axis, size in axes):
            raise InputRefused(
                f"`{self._name}` takes `{name}` {list(declared.shape)}, not {list(array.shape)}",
                hint="the processor in the folder prepares images of another size than `config.json` has",
            )
        return np.ascontiguousarray(array, dtype=TENSOR_DTYPES.get(declared.type, array.dtype))
