"""`verify`: runs the scenarios on the eager model and on every graph of a folder, and compares all outputs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from llmconv.argument_checks import checked
from llmconv.errors import InputRefused
from llmconv.files.paths import Written
from llmconv.files.sources import fetches, is_remote
from llmconv.runtime.onnxruntime.session_settings import SessionSettings, with_options
from llmconv.verify.arguments import require_folder, require_model
from llmconv.verify.clients.client import chosen_clients
from llmconv.verify.folder_checks import Choices, checked_folder
from llmconv.verify.graph_folder import GraphFolder
from llmconv.verify.method import AUTO, Method
from llmconv.verify.other_exporters.quantized.accuracy import AccuracyLimits
from llmconv.verify.other_exporters.run import require_limits
from llmconv.verify.reference.eager import Eager
from llmconv.verify.report.files import reporter
from llmconv.verify.results.report import Report
from llmconv.verify.scenarios.budget import Budget
from llmconv.verify.scenarios.selection import Selection
from llmconv.verify.verification import OnChecks, Session


@fetches
@checked
def verify(  # noqa: PLR0913 - one parameter per option of the command
    folder: str | Path,
    *,
    reference: str | Path | None = None,
    suite: str = "quick",
    scenario: str | Sequence[str] = (),
    repeat: int = 1,
    settings: SessionSettings | None = None,
    provider: str | None = None,
    threads: int | None = None,
    timeout: float | None = None,
    on_checks: OnChecks | None = None,
    eager: Eager | None = None,
    trust_remote_code: bool = False,
    bisect: bool = False,
    minimize: Written | None = None,
    low_memory: bool | None = None,
    allow_changed: bool = False,
    text: str | Path | None = None,
    max_divergence: float | None = None,
    min_agreement: float | None = None,
    calibrate: str | Path | None = None,
    method: str = AUTO,
    layers: str | None = None,
    record: bool = True,
    budget: float | None = None,
    adapter: str | Path | None = None,
    clients: str | Sequence[str] = (),
    pythons: str | Sequence[str] = (),
    report: Written | None = None,
) -> Report:
    """Compares every output of every graph in a folder with the eager model.

    Args:
        folder: a folder that `llmconv export` wrote.
        reference: the Hugging Face model folder (default: as recorded in the manifest, else `folder`).
        suite: which set of scenarios to run, `quick` or `full`.
        scenario: names of scenarios; if given, only these are run.
        repeat: number of runs of each call; all must give the same bits.
        settings: of onnxruntime; the next three replace single ones.
        provider: provider of onnxruntime: `cpu`, `cuda`, …; the CPU runs the rest.
        threads: threads of onnxruntime; 0 for one per core.
        timeout: time limit in seconds of a run of a small graph; larger graphs get more (default: 60).
        on_checks: called with each list of checks when it is made.
        eager: an open reference of this model, whose results are reused.
        trust_remote_code: run the code that `auto_map` in the reference's `config.json` names.
        bisect: after a failure, search for the first node that differs.
        minimize: a new folder for the smallest failing piece; implies the search.
        low_memory: hold one layer at a time (`verify.comparison.layer_by_layer`); None to decide by free memory.
        allow_changed: a graph that was changed after its export is a note instead of a failure.
        text: text file on which the accuracy of quantized weights is measured; default: a text that ships with llmconv.
        max_divergence: maximum mean divergence of quantized weights, in nats per token (default: by preset).
        min_agreement: minimum share of tokens with the same most likely next token.
        calibrate: the text file on which `export` measured the ranges of an int8 cache or of activations.
        method: `whole`, `induction` over layers, `structure` without numbers, or `auto` to choose by the model's size.
        layers: of an induction, the layers that run by themselves: `all` (default), `sampled:K` or `classes`.
        record: record the verdict in the manifest of `folder`, if it has one and is not an address.
        adapter: LoRA adapter whose factors the graphs take as inputs, unmerged in the reference. Nothing is recorded.
        clients: `genai`, `optimum` or `transformersjs`: their greedy tokens are compared with the model's.
        pythons: `CLIENT=PATH` of a Python that has the client, or of the folder with its `node_modules`.
        report: a folder to write the report into, as report.json, report.html, summary.md and junit.xml.
        budget: seconds after which only mandatory scenarios run (`verify.scenarios.budget`); None for no limit.

    Raises:
        InputRefused: the folder has no graphs, it or the reference cannot be used, a graph refers to other folders,
            memory is too small, or a client is not installed.
        OutOfMemory: memory ran out during the run.
        UsageProblem: an unknown suite or scenario, options that exclude each other or that the graphs do not have,
            quantized weights without `reference`, or the folder for the smallest failing piece is not empty.
    """
    require_limits(max_divergence=max_divergence, min_agreement=min_agreement)
    chosen = Method.of(method, layers)
    run_by = chosen_clients(clients, pythons)
    only = [scenario] if isinstance(scenario, str) else scenario
    selection = Selection(suite, only, repeat, Budget.of(budget, only))
    own = with_options(settings, provider, threads, timeout)
    session = Session.of(selection, own, on_checks, bisect=bisect, minimize=minimize)
    chosen.require_runs(session, low_memory=low_memory)
    written = reporter(report)
    path = require_folder(folder)
    for client in run_by:
        client.require()
    made = session.new_report(path.name)
    opened = GraphFolder.open(path, reference, made, session, allow_changed=allow_changed, trusted=trust_remote_code)
    if opened is None:
        raise InputRefused(f"no graphs in `{require_model(path)}`", hint=f"make them: `llmconv export {path}`")
    accuracy = Path(text) if text else None, AccuracyLimits(max_divergence, min_agreement)
    measured, record = Path(calibrate) if calibrate else None, record and not is_remote(folder)
    choices = Choices(chosen, eager, low_memory, adapter, *accuracy, measured, record, run_by)
    return written(checked_folder(opened, choices))
