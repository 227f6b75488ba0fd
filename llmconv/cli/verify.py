"""`llmconv verify`: compares the graphs of a folder with the eager model."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import click

from llmconv.cli import options
from llmconv.cli.command_group import Command
from llmconv.cli.options import option
from llmconv.cli.verdict import print_report, printer
from llmconv.errors import UsageProblem
from llmconv.progress import is_quiet, say, status

OF_GRAPHS = ("input_map",)
# options that apply only to `--graph`, and only to FOLDER
OF_FOLDER = ("low_memory", "allow_changed", "calibrate", "method", "layers", "record", "adapter", "clients", "pythons")


@click.command("verify", cls=Command)
@click.argument("folder", required=False)
@option(
    "--graph graphs FILE",
    "A graph of any exporter instead of FOLDER; give it twice for prefill and decode.",
    click.Path(path_type=Path),
    multiple=True,
)
@option(
    "--input-map NAME",
    "Names of its inputs: auto (default), genai, llmconv, mobius, optimum, transformers, or a JSON file.",
)
@option(
    "--reference PATH",
    "Hugging Face model folder, or a GGUF file.  [default: FOLDER's own weights; required after `export --quant`]",
)
@option("--suite", "Which scenarios to run.", ["quick", "full"], default="quick")
@option("--scenario NAME", "Run only this scenario; may be repeated.", multiple=True)
@option(
    "--budget TIME",
    "Time after which only mandatory scenarios run, such as 60s, 5m or 1h; the others are listed as skipped.",
    options.Duration(),
)
@option(
    "--text FILE", "Text to measure the cost of quantization on.  [default: llmconv's own]", click.Path(path_type=Path)
)
@option(
    "--calibrate FILE",
    "The text that was given to `export` with --kv-cache or --static-activations, which need it.",
    click.Path(path_type=Path),
)
@option("--max-divergence NATS", "Fail if the mean KL divergence exceeds this.", click.FloatRange(0))
@option("--min-agreement SHARE", "Fail if the share of equal likeliest tokens is lower.", click.FloatRange(0, 1))
@option("--repeat", "Number of runs of each call; all must give equal bits.", click.IntRange(1), default=1)
@option("--report", "Write JSON, JUnit, Markdown and HTML reports to this folder.", options.Output())
@option("--github", "Also print failures as GitHub Actions annotations.")
@option("--bisect", "Name the first node that differs, and list nodes without a counterpart in the model.")
@option("--minimize", "Write the smallest failing piece to a new folder.", options.Output())
@option("--provider NAME", "Provider of onnxruntime: cpu, cuda, …; the CPU runs the rest.")
@option("--threads", "Threads of onnxruntime; 0 for one per core.", click.IntRange(0), default=0)
@option(
    "--timeout SECONDS",
    "Time limit of a run of a small graph; larger graphs get more time.  [default: 60]",
    click.FloatRange(0, min_open=True),
)
@option(
    "--low-memory/--no-low-memory",
    "Hold one layer of the model at a time, or the whole model.  [default: by available memory]",
    default=None,
)
@option(
    "--method",
    "Run the whole model, one layer of each kind (induction), or compare no numbers (structure).",
    ["auto", "whole", "induction", "structure"],
    default="auto",
)
@option(
    "--layers CHOICE",
    "With induction, the layers that also run by themselves: all, sampled:K or classes.  [default: all]",
)
@option(
    "--adapter PATH", "Compare graphs of `export --lora-inputs` with the eager model and this LoRA adapter of PEFT."
)
@option(
    "--client clients NAME",
    "Also generate with this client, and compare its tokens: genai, optimum or transformersjs; may be repeated. Or run "
    "a GGUF file in place of FOLDER: llamacpp. Or a Hugging Face folder: vllm.",
    multiple=True,
    shell_complete=options.clients,
)
@option(
    "--python pythons CLIENT=PATH",
    "Python that has the client, such as genai=PATH; of transformersjs, the folder with its node_modules.",
    multiple=True,
)
@option("--allow-changed", "A graph that was changed after its export is a note instead of a failure.")
@option("--no-record record", "Do not record the verdict in FOLDER's llmconv.json.", flag_value=False, default=True)
@options.trust_remote_code
@options.as_json
@partial(
    options.talk,
    quiet="Print only the line with the verdict, and with --bisect the location of a failure.",
    verbose="Print a line per graph and output; show the traceback of an error.",
)
@click.pass_context
def command(
    ctx: click.Context, /, folder: str | None, graphs: tuple[Path, ...], github: bool, as_json: bool, **choices: Any
) -> None:
    """Compare every output of the graphs in FOLDER with the eager model.

    With --graph instead of FOLDER, it compares a graph of another exporter: optimum-onnx, the ONNX Runtime GenAI
    builder, transformers' exporter, mobius-onnx. A graph with quantized weights is compared with a model of the same
    weights, and the cost of quantization is reported: divergence from the full model, likeliest tokens, perplexity on
    --text.

    A large model is verified by induction: its graph is cut into layers, which are compared with each other; one layer
    of each kind runs all scenarios, and every layer runs a few tokens.

    Prints a line per scenario and, after a failure, the outputs that differ. The verdict is recorded in FOLDER's
    llmconv.json, and `inspect` shows it.

    With --client llamacpp, FOLDER is a GGUF file: llama.cpp's logits, tokens and tokenizer are compared with the model.
    With --client vllm, it is a Hugging Face folder, also one of `quantize`: vLLM's log-probabilities, tokens and
    tokenizer are compared, with --adapter those of the adapter that it serves.

    Exit code 0: equal up to rounding. 1: a difference was found. 5: nothing could be compared.
    """
    from llmconv.verify.report.files import annotation_lines

    _require_compatible(folder, graphs, choices)
    _refuse_early(folder, choices)
    if not as_json:
        status("loading torch, transformers and onnxruntime …")
    started = time.perf_counter()
    shown = printer(every=ctx.meta.get(options.VERBOSE, False))
    quiet = as_json or is_quiet()
    # the report; `choices` are the options that the library takes under the same names
    from llmconv.verify import verify, verify_graphs

    of_both = {name: value for name, value in choices.items() if name not in {*OF_GRAPHS, *OF_FOLDER}}
    given = {**of_both, "on_checks": None if quiet else shown}
    report = (
        verify_graphs(graphs, **{name: choices[name] for name in OF_GRAPHS if choices[name] is not None}, **given)
        if folder is None
        else verify(folder, **{name: choices[name] for name in OF_FOLDER}, **given)
    )
    if as_json:
        options.print_json(report.as_dict())
    else:
        print_report(report, shown, quiet=quiet, where=choices["bisect"])
    for line in annotation_lines(report) if github else ():
        click.echo(line, err=as_json)
    where = f", report in {choices['report']}" if choices["report"] else ""
    say(f"{time.perf_counter() - started:.1f} s{where}")
    ctx.exit(report.exit_code)


def _refuse_early(folder: str | None, choices: dict[str, Any]) -> None:
    """Refuses what options and JSON alone show, before torch is imported; `verify` checks all of it again."""
    from llmconv.files.sources import is_remote
    from llmconv.output.manifest import graph_entries, single_pass_entries
    from llmconv.verify.arguments import recorded_reference, require_folder
    from llmconv.verify.scenarios.selection import Selection

    Selection(choices["suite"], choices["scenario"], choices["repeat"])
    if folder is None or is_remote(folder) or {"llamacpp", "vllm"} & {*choices["clients"]}:
        return
    path = require_folder(folder)
    if choices["reference"] is None and (graph_entries(path) or single_pass_entries(path)):
        recorded_reference(path)


def _require_compatible(folder: str | None, graphs: tuple[Path, ...], choices: dict[str, Any]) -> None:
    """Refuses combinations of options that exclude each other, with UsageProblem."""
    if (folder is None) is not bool(graphs):
        message = "give either FOLDER or `--graph FILE`"
        raise UsageProblem(message, hint="FOLDER is a folder that `llmconv export` wrote to")
    if choices["input_map"] and not graphs:
        message = "`--input-map` applies to `--graph` only"
        raise UsageProblem(message, hint="leave it out: FOLDER records the inputs of its graphs")
    searches = choices["bisect"] or choices["minimize"] is not None
    if choices["low_memory"] and (graphs or searches or choices["repeat"] > 1):
        problem = "`--low-memory` excludes `--graph`, `--repeat`, `--bisect` and `--minimize`"
        raise UsageProblem(problem, hint="leave out `--low-memory` or the other options")
    if graphs and (choices["method"] not in ("auto", "whole") or choices["layers"] is not None):
        raise UsageProblem("`--method` and `--layers` apply to FOLDER only", hint="leave them out")
    of_folder = {
        "--adapter": (choices["adapter"] is not None, "leave out `--adapter`"),
        "--calibrate": (choices["calibrate"] is not None, "leave out `--calibrate`"),
        "--no-record": (not choices["record"], "leave it out: a verdict on `--graph` is never recorded"),
        "--client": (choices["clients"], "a client needs the files that `export --layout` writes"),
        "--allow-changed": (choices["allow_changed"], "leave it out: no checksum of a `--graph` is recorded"),
    }
    for name, (is_given, hint) in of_folder.items():
        if graphs and is_given:
            raise UsageProblem(f"`{name}` applies to FOLDER only", hint=hint)
