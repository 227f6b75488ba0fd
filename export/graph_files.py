"""Options of `llmconv export` that change what a graph computes, takes or returns."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import onnx
import onnx_ir as ir

from llmconv.errors import UnsupportedInput, UsageProblem
from llmconv.export.clients import DEFAULT, ClientFiles, EncodedGraphs, FileContent, weight_files
from llmconv.export.export_options import FILES, TARGETS
from llmconv.export.graph_spec import FLOAT32, GROWING, NO_CACHE, GraphSpec
from llmconv.export.quantization.settings import QuantizationSettings
from llmconv.export.rewrite.last_logits import keep_last_logits
from llmconv.export.rewrite.lora_inputs import add_lora_inputs
from llmconv.export.rewrite.passes import IR_VERSIONS, TokenChoice, choose_tokens, quantize_cache, to_opset
from llmconv.export.rewrite.pipeline_stages import require_stages, split
from llmconv.export.targets.kernels import Fallback, fallbacks, find_signature, has_kernel, typed_nodes
from llmconv.export.traced_graph import NodeEditor, TracedGraph, replace_value
from llmconv.export.weights import WeightSource, bind, mapped_bytes
from llmconv.files.weight_ranges import Mapped
from llmconv.output.manifest import EMBEDDINGS_ROLE, VISION_ROLE
from llmconv.progress import warn_all
from llmconv.tensors import Array, lists_by_key

if TYPE_CHECKING:
    from llmconv.export.prefix import PrefixFile
    from llmconv.export.quantization.selection import QuantizedWeight, StoredFormats
    from llmconv.runtime.prefix import Prefix


@dataclass(frozen=True)
class GraphOptions:
    """Options that change what a graph computes, takes or returns. Raises UsageProblem: another `opset`."""

    last_logits: bool = False  # compute the head for the last position only: `logits` are `[batch_size, 1, vocab]`
    choice: TokenChoice | None = None  # return `tokens` and `scores` instead of `logits`; None for logits
    stages: int = 1  # number of graphs that the layers are divided into
    prefix: Prefix | None = None  # virtual tokens before every prompt; None for none
    # version of the standard operators, 21, 23 or 24; None for that of the graph spec, 23 or 24
    opset: int | None = None
    strict_target: bool = False  # refuse nodes for which the target's provider has no kernel; otherwise they are listed
    # which weights become integer codes, or are stored as such; None for none
    quantization: QuantizationSettings | StoredFormats | None = None
    # sha256 of the text on which the ranges of an int8 cache are measured; empty for a cache of floats
    cache_text: str = ""
    lora: tuple[str, ...] = ()  # linear layers with optional inputs for LoRA factors
    names: Mapping[str, str] = field(default_factory=dict)  # file names of roles that do not have their usual one

    def __post_init__(self) -> None:
        if self.opset is not None and self.opset not in IR_VERSIONS:
            raise UsageProblem(f"`opset` is {self.opset}", hint=f"one of: {', '.join(map(str, IR_VERSIONS))}")

    def manifest_fields(self) -> dict[str, Any]:
        """Fields of a graph's manifest entry, defaults left out; those of a prefix are in `PrefixFile`."""
        fields = {
            "last_logits": self.last_logits,
            "postprocess": self.choice.text if self.choice else "",
            "calibrate": self.cache_text,
            "lora_inputs": list(self.lora),
        }
        quantized = self.quantization.manifest_fields() if self.quantization else {}
        return {**{name: value for name, value in fields.items() if value}, **quantized}


PROMPT_ROLES = {"prefill", "unified"}  # graphs that run prompts; afterwards the prefix is in the cache


@dataclass
class GraphFiles:
    """Everything that an export writes besides weights: files by path in the folder, manifest entries by role."""

    files: dict[str, FileContent] = field(default_factory=dict)
    entries: dict[str, dict[str, Any]] = field(default_factory=dict)
    # fields that clients need in the `config.json` of a new folder
    config: dict[str, Any] = field(default_factory=dict)
    mapped: int = 0  # bytes of weights that the graphs map, each counted once
    # nodes without a kernel on the target's provider, by file name
    fallback: dict[str, list[Fallback]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Number of bytes of all graphs and prefixes, without links."""
        files = [content for name, content in self.files.items() if name.endswith((".onnx", ".graph", ".safetensors"))]
        return sum(len(content) for content in files if isinstance(content, bytes))


@dataclass(frozen=True)
class GraphPlan:
    """Which graphs to make of a model, and how; `specs` by role in the order in which they are written.

    Raises UsageProblem: options that contradict each other, or that a client does not support; InputRefused: a client
    cannot run this model.
    """

    specs: Mapping[str, GraphSpec]
    clients: ClientFiles
    options: GraphOptions = field(default_factory=GraphOptions)

    def __post_init__(self) -> None:
        spec, options = next(iter(self.specs.values())), self.options
        if options.prefix and not PROMPT_ROLES & self.specs.keys():
            raise UsageProblem(
                "`--prefix` changes the graph for prompts, which is not exported",
                hint="add `--prefill` or `--unified`; the decode graph finds the prefix in its cache",
            )
        if options.prefix and spec.precision != FLOAT32:
            raise UsageProblem(
                f"`--prefix` adds keys and values in float32 to a cache of {spec.precision}",
                hint="leave out `--prefix`, or `--precision`",
            )
        _require_plain_products(options, spec)
        if spec.cache not in (GROWING.cache, NO_CACHE) and options.opset and options.opset < spec.opset:
            raise UsageProblem(
                f"opset {options.opset} has no operator that writes into a buffer of fixed length",
                hint=f"leave out `--opset {options.opset}`: such graphs have opset {spec.opset}",
            )
        growing_only = "--prefix" if options.prefix else "--stages" if options.stages > 1 else ""
        if growing_only and (spec.cache != GROWING.cache or spec.embeddings):
            raise UsageProblem(
                f"`{growing_only}` requires graphs that take tokens and have a growing cache",
                hint=f"leave out `{growing_only}`, or `--embeds`" if spec.embeddings else f"leave out `{growing_only}`",
            )
        given = {"--postprocess": options.choice, "--stages": options.stages > 1, "--prefix": options.prefix}
        own = next((name for name, value in {**given, "--lora-inputs": options.lora}.items() if value), "")
        self.clients.check(own, takes_embeddings=bool(spec.embeddings))

    def file_names(self, role: str) -> list[str]:
        whole, count = self.options.names.get(role, FILES[role]), self.options.stages
        if count == 1:
            return [whole]
        return [f"{whole.removesuffix('.onnx')}-{number}-of-{count}.onnx" for number in range(1, count + 1)]

    def manifest_options(self) -> dict[str, Any]:
        options, spec = self.options, next(iter(self.specs.values()))
        return {
            "graphs": list(self.specs),
            "layouts": tuple(client.name for client in self.clients.clients if client.name != DEFAULT),
            **options.manifest_fields(),
            "stages": options.stages if options.stages > 1 else None,
            "prefix": options.prefix.kind if options.prefix else None,
            "opset": options.opset,
            "graph_names": dict(options.names) or None,
            **spec.manifest_fields(),
        }

    def make(
        self,
        graphs: Mapping[str, TracedGraph],
        weights: Mapping[str, Mapped],
        sources: Mapping[str, Mapped],
        quantized: Mapping[str, QuantizedWeight],
        matches: Mapping[int, Mapping[str, WeightSource]],
        cache_scales: Mapping[str, Array] | None,
    ) -> GraphFiles:
        """Binds the graphs to the weights and encodes all files.

        Raises InputRefused: the weights are not of this model, an option does not fit it, or `strict_target` is given
        and the target's provider has no kernel for a node; UsageProblem: more stages than layers, or more tokens to
        choose than the vocabulary has.

        Args:
            graphs: traced graphs by role; roles may share one. They are changed.
            weights: where each tensor is in the folder of the graphs once the export is complete.
            sources: the same tensors in files that can be read now; only a soft prompt reads them.
            quantized: the tensors that are stored as codes, by name.
            matches: the stored tensors of each weight by `id` of the graph.
            cache_scales: scales of an int8 cache, by name of the cache input; None for a cache of floats.
        """
        distinct = list({id(traced): traced for traced in graphs.values()}.values())
        require_stages(self.options.stages, distinct[0].num_layers)
        products, prefix = None, None
        if quantized:
            from llmconv.export.quantization.products import QuantizedProducts  # noqa: PLC0415 - most exports are of floats

            products = QuantizedProducts(quantized, distinct[0].spec.target)
        if self.options.prefix:  # all graphs of such an export share one trace
            from llmconv.export.prefix import PrefixFile  # noqa: PLC0415 - most exports have none

            rounded = {**sources, **weights}  # quantized weights count as they were before
            prefix = PrefixFile.make(self.options.prefix, distinct[0], matches[id(distinct[0])], sources, rounded)
        for traced in distinct if self.options.lora else ():
            add_lora_inputs(traced, matches[id(traced)], self.options.lora)
        for traced in distinct:
            bind(traced, matches[id(traced)], weights, quantized=products)
            if cache_scales and traced.spec.kv_cache:
                quantize_cache(traced.model, cache_scales)
        made = GraphFiles(mapped=mapped_bytes(distinct))
        for traced in distinct:
            self._add_graph(made, traced, [role for role, graph in graphs.items() if graph is traced], prefix)
        report(made.fallback, next(iter(self.specs.values())).target, strict=self.options.strict_target)
        if self.options.stages == 1:  # no client supports stages
            known = [role for role in (*self.specs, EMBEDDINGS_ROLE, VISION_ROLE) if role in made.entries]
            files = {role: self.file_names(role)[0] for role in known}
            encoded = {role: one for role, name in files.items() if isinstance(one := made.files[name], bytes)}
            graph_set = EncodedGraphs(encoded, files, tuple(sorted({tensor.location for tensor in weights.values()})))
            made.files.update(self.clients.files(graph_set))
            made.config.update(self.clients.config(graph_set))
        return made

    def _add_graph(
        self, made: GraphFiles, traced: TracedGraph, roles: Sequence[str], prefix: PrefixFile | None
    ) -> None:
        prompts = [role for role in roles if role in PROMPT_ROLES] if prefix else []
        if prefix and prompts:
            prompt_model = traced.model.clone()
            prefix.prepend(prompt_model)
            made.files[prefix.name] = prefix.content
            self._add_roles(made, prompt_model, traced, prompts, prefix.manifest_fields())
        if steps := [role for role in roles if role not in prompts]:
            self._add_roles(made, traced.model, traced, steps, {})

    def _add_roles(
        self,
        made: GraphFiles,
        model: ir.Model,
        traced: TracedGraph,
        roles: Sequence[str],
        prefix_fields: Mapping[str, Any],
    ) -> None:
        if self.options.last_logits and roles[0] in self.specs:
            keep_last_logits(model)
        if self.options.choice and roles[0] in self.specs:
            choose_tokens(model, self.options.choice)
        if self.options.opset and self.options.opset != model.opset_imports[""]:
            to_opset(model, self.options.opset)
        if traced.spec.precision == "bfloat16":
            widen_without_kernels(model)
        whole = ir.to_proto(model)
        parts = [whole]
        if self.options.stages > 1:
            parts = split(whole, self.options.stages, traced.layers_name, traced.num_layers)
        target = traced.spec.target
        missing = fallbacks(whole, target) if target and TARGETS[target].compared else []
        wide = float32_fields(whole, traced.spec.precision)
        contents = [bytes(part.SerializeToString(deterministic=True)) for part in parts]
        for role in roles:
            names = self.file_names(role)
            made.files.update(zip(names, contents, strict=True))
            fields = self.options.manifest_fields() if role in self.specs else {}
            stages = [
                {"file": name, "weights": weight_files(part), **_ports(part)}
                for name, part in zip(names, parts, strict=True)
            ]
            place: dict[str, Any] = {"stages": stages} if len(stages) > 1 else {"file": names[0]}
            entry = {**place, "opset": model.opset_imports[""], **_ports(whole), **fields}
            entry |= {**traced.spec.manifest_fields(), **wide, **prefix_fields}
            entry |= {"fallback": [one.manifest_fields() for one in missing]} if missing else {}
            made.entries[role] = entry
            made.fallback[names[0]] = missing


def _require_plain_products(options: GraphOptions, spec: GraphSpec) -> None:
    """Refuses options that change the products which LoRA factors are added to."""
    given = {
        f"--precision {spec.precision}": spec.precision != FLOAT32,
        "--stages": options.stages > 1,
        "--quant": options.quantization,
        "--kv-cache": spec.kv_cache,
    }
    other = next((name for name, value in given.items() if value), None)
    if options.lora and other:
        raise UsageProblem(
            f"`--lora-inputs` is for whole graphs in float32, without `{other}`",
            hint=f"leave out `{other}`; or merge the adapter: `llmconv merge-lora BASE ADAPTER -o OUT`",
        )


def _ports(model: onnx.ModelProto) -> dict[str, list[str]]:
    defaults = {tensor.name for tensor in model.graph.initializer}
    return {
        "inputs": [port.name for port in model.graph.input if port.name not in defaults],
        "outputs": [port.name for port in model.graph.output],
    }


MOVING = {  # operators that compute no number
    *("Cast", "CastLike", "Concat", "Constant", "ConstantOfShape", "Expand", "Gather", "GatherElements", "GatherND"),
    *("Identity", "Pad", "Reshape", "ScatterElements", "ScatterND", "Shape", "Slice", "Split", "Squeeze"),
    *("Transpose", "Unsqueeze", "Where"),
}

FUNCTIONS = "functions"  # stands for the module of nodes in the graph's functions
LAYER = re.compile(r"(?<=\.)\d+(?=\.|$)")  # number of a layer in the name of a module


def float32_fields(model: onnx.ModelProto, precision: str) -> dict[str, Any]:
    """The field `float32` of a graph's manifest entry: the operators that compute in float32, by module.

    All layers count as one, `model.layers.*`. An operator that only computes in float32 inside, such as
    `RMSNormalization` with `stash_type`, is not listed. A graph whose `precision` is float32 has no such field.
    """
    if precision == FLOAT32:
        return {}
    found: dict[str, set[str]] = defaultdict(set)
    for node in typed_nodes(model):
        kinds = [node.inputs, *node.bound.values()]
        if node.operator not in MOVING and any(FLOAT32 in found for found in kinds):
            module = node.name.rpartition("/")[0]
            found[LAYER.sub("*", module) or FUNCTIONS].add(node.operator)
    return {"float32": {module: sorted(operators) for module, operators in sorted(found.items())}}


LINES = 8  # longest list of warnings


def widen_without_kernels(model: ir.Model) -> None:
    """Computes bfloat16 nodes that neither CUDA nor the CPU has a kernel for in float32, in place.

    onnxruntime cannot open a graph with such a node. The functions of a graph stay as they are.
    """
    nodes = {node.name: node for node in typed_nodes(ir.to_proto(model)) if "bfloat16" in node.inputs}
    for node in list(model.graph):
        typed = nodes.get(node.name or "")
        if typed is None or any(has_kernel(typed, target) for target in ("ort-cuda", "ort-cpu")):
            continue
        signature = find_signature(node.domain, node.op_type, model.opset_imports.get(node.domain, 1))
        editor = NodeEditor(model.graph, node, typed.name, module_of=node)
        for at, value in enumerate(node.inputs):
            formal = signature.inputs[min(at, len(signature.inputs) - 1)]
            if value is not None and "bfloat16" in typed.bound.get(formal.name, ()):
                node.replace_input_with(at, editor.one("Cast", [value], {"to": ir.DataType.FLOAT}))
        for value, formal in zip(node.outputs, signature.outputs, strict=False):
            if "bfloat16" in typed.bound.get(formal.constraint, ()):
                _narrow(model.graph, node, value)


def _narrow(graph: ir.Graph, node: ir.Node, value: ir.Value) -> None:
    """Makes an output of a node float32, and a `Cast` after it what others read."""
    cast = ir.node("Cast", [value], {"to": ir.DataType.BFLOAT16}, name=f"{node.name}/Narrow")
    cast.metadata_props.update(node.metadata_props)
    graph.insert_after(node, cast)
    replace_value(value, cast.outputs[0])
    cast.replace_input_with(0, value)
    value.name, value.dtype = f"{node.name}:wide", ir.DataType.FLOAT


def report(found: Mapping[str, Sequence[Fallback]], target: str | None, *, strict: bool) -> None:
    """Warns of nodes without a kernel, or raises UnsupportedInput if `strict`; files with equal nodes share a line."""
    graphs = lists_by_key((one, file) for file, fallen in found.items() for one in fallen)
    if strict and graphs:
        kinds = list(dict.fromkeys(map(str, graphs)))
        raise UnsupportedInput(
            f"no kernel in `{target}` for {', '.join(kinds[:LINES])}{' …' if len(kinds) > LINES else ''}",
            hint="leave out `--strict-target`: these nodes then run on the CPU, with a copy of their values per call",
        )
    lines = []
    for kind, names in graphs.items():
        nodes, run = ("node", "runs") if kind.count == 1 else ("nodes", "run")
        where = f"{kind.count:,} {nodes} of {', '.join(names)} {run} on the CPU, such as `{kind.first}`"
        lines.append(f"no kernel in `{target}` for {kind}: {where}")
    left = len(lines) - LINES + 1
    warn_all(lines if left <= 1 else [*lines[: LINES - 1], f"and {left} more kinds of nodes, see `llmconv.json`"])
