"""verify_graphs: graphs of any exporter against the eager model; the scenarios are those of llmconv's own graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import onnx

from llmconv.checkpoint import open_weights
from llmconv.errors import LlmconvError, UsageProblem
from llmconv.runtime.guard import load_guarded
from llmconv.runtime.ort import SessionSettings
from llmconv.tensors import LazyTensor
from llmconv.verify.compare import GATES
from llmconv.verify.foreign.candidate import check_foreign, foreign_candidates
from llmconv.verify.foreign.contents import Content
from llmconv.verify.foreign.graph import DTYPES, ForeignGraph, Model
from llmconv.verify.foreign.maps import AUTO, find_port_maps
from llmconv.verify.foreign.ports import Binding, bind
from llmconv.verify.foreign.structure import check_ports, dead_inputs
from llmconv.verify.foreign.weights import absent, audit_contents, contents_of
from llmconv.verify.localise import localise
from llmconv.verify.report import Check, Report
from llmconv.verify.scenarios import scenarios
from llmconv.verify.session import collector, library_versions, require_suite
from llmconv.verify.truth import Eager

MOST = 2
"""One graph, or that of the prompt and that of the steps."""

OnChecks = Callable[[list[Check]], None]


def verify_graphs(
    paths: Sequence[str | Path],
    *,
    reference: str | Path | None = None,
    input_map: str = AUTO,
    suite: str = "quick",
    settings: SessionSettings | None = None,
    on_checks: OnChecks | None = None,
    eager: Eager | None = None,
    trust_remote_code: bool = False,
) -> Report:
    """Compares a graph of any exporter, or those of prompt and steps, with the eager model; arguments as in `verify`.

    Args:
        paths: one file, or two.
        reference: the Hugging Face folder of the model; the graph's own folder when left out.
        input_map: name of a row of `maps`, `auto`, or a JSON file.
        suite, settings, on_checks, eager, trust_remote_code: as for `verify`.

    Raises:
        UsageProblem: no graph or too many, no reference, an unknown map, or a graph of steps without one of the prompt.
        InputRefused: a graph fits no map, or refers to what it must not.
    """
    require_suite(suite)
    files = [Path(path) for path in paths]
    folder = _reference(files, reference)
    rows = find_port_maps(input_map)
    models = [load_guarded(path) for path in files]
    bindings = [bind(model, path.name, rows) for path, model in zip(files, models, strict=True)]
    report = Report(" and ".join(path.name for path in files), folder.name, suite, versions=library_versions())
    add = collector(report, on_checks)
    code = folder if trust_remote_code else None
    eager = eager or Eager(folder, _dtype(models[0], bindings[0]), code=code)
    _audit(files, models, open_weights(folder), report, add)
    graphs = _open(files, models, bindings, eager, settings or SessionSettings(), add)
    if len(graphs) == len(files):
        _notes(graphs, models, report)
        _compare(eager, graphs, report, add)
    report.where = localise(report.checks)
    return report


def _reference(paths: Sequence[Path], reference: str | Path | None) -> Path:
    if not 0 < len(paths) <= MOST:
        raise UsageProblem(f"{len(paths)} graphs were given", hint="give one, or that of the prompt and of the steps")
    folder = Path(reference) if reference else paths[0].parent
    if reference is None and not any(folder.glob("*.safetensors")):
        raise UsageProblem(
            f"`{folder}` holds no model to compare `{paths[0].name}` with", hint="give `--reference HF_FOLDER`"
        )
    return folder


def _dtype(model: onnx.ModelProto, binding: Binding) -> str:
    """Of the logits, as the file says."""
    port = next(port for port in model.graph.output if port.name == binding.port_map.logits)
    kind = onnx.TensorProto.DataType.Name(port.type.tensor_type.elem_type).lower()
    return DTYPES.get(f"tensor({kind})", "float32")


def _audit(
    paths: Sequence[Path],
    models: Sequence[onnx.ModelProto],
    tensors: Mapping[str, LazyTensor],
    report: Report,
    add: OnChecks,
) -> None:
    """One check per graph; tensors that are in none are a note."""
    found: dict[str, Content] = {}
    for path, model in zip(paths, models, strict=True):
        contents = contents_of(model, path.parent, tensors)
        add([audit_contents(path.name, contents, tensors)])
        found |= {f"{path}:{name}": content for name, content in contents.items()}
    missing = absent(found, tensors)
    if found and missing:
        report.notes.append(f"{len(missing)} tensors of the model are in no graph as they are, first `{missing[0]}`")


def _open(
    paths: Sequence[Path],
    models: Sequence[onnx.ModelProto],
    bindings: Sequence[Binding],
    eager: Eager,
    settings: SessionSettings,
    add: OnChecks,
) -> list[ForeignGraph]:
    """The graphs that onnxruntime opens and whose cache is the model's; the others are failed checks."""
    model_facts, graphs = Model(eager.cache_shapes(), eager.facts().window), []
    for path, model, binding in zip(paths, models, bindings, strict=True):
        name = path.name if len({path.name for path in paths}) == len(paths) else f"{path.parent.name}-{path.name}"
        try:
            graph = ForeignGraph(path, model, binding, model_facts, settings, name)
        except LlmconvError as error:
            add([Check("structure", name, "", verdict="fail", detail=error.message)])
            continue
        check = check_ports(graph, model_facts.cache_shapes)
        add([check])
        if check.verdict == "pass":
            graphs.append(graph)
    return graphs


def _notes(graphs: Sequence[ForeignGraph], models: Sequence[onnx.ModelProto], report: Report) -> None:
    for graph, model in zip(graphs, models, strict=True):
        report.notes += [f"{graph.name}: input `{name}` has no effect" for name in dead_inputs(model)]
        if not graph.outputs:
            report.notes.append(f"{graph.name}: gives no keys and values, so its logits alone are compared")
        if not graph.keeps_cache:
            report.notes.append(f"{graph.name}: takes no past, so it is given the whole sequence at every step")
        if graph.limits.tokens == 1:
            report.notes.append(f"{graph.name}: takes one token, so several are given one after another")


def _compare(eager: Eager, graphs: Sequence[ForeignGraph], report: Report, add: OnChecks) -> None:
    """All scenarios on every graph that can begin alone, and on two together."""
    found = foreign_candidates(graphs)
    gates = GATES[eager.dtype]
    for scenario, chains in scenarios(report.suite, eager.facts()):
        truths = eager.truths(scenario, chains)
        for candidate in found:
            if len(candidate.foreign) == 1 or any(len(chain) > 1 for chain in chains):
                add(check_foreign(scenario, chains, candidate, truths, eager, gates))
