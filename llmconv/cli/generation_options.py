"""Options of the commands that generate text: backend and session, sampling, chat template."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from llmconv.cli import options
from llmconv.cli.options import MADE, ElementType, option
from llmconv.errors import UsageProblem

Command = TypeVar("Command", bound=Callable[..., Any])

template = option(
    "--template NAME",
    "Chat template: tokenizer (its own), alpaca, v1_2, vicuna, or a Jinja file.",
    default="tokenizer",
    shell_complete=options.templates,
)

PICKING = (
    option(
        "--max-new-tokens",
        "Maximum number of new tokens. Default: generation_config.json, else 64 (chat: 2048).",
        click.IntRange(1),
    ),
    option("--max-length", "Maximum number of tokens, prompt included.", click.IntRange(1)),
    option("--temperature", "Sampling temperature; 0 means greedy decoding.", click.FloatRange(0)),
    option("--top-k", "Sample from the k likeliest tokens; 0 for all. Default: 50.", click.IntRange(0)),
    option(
        "--top-p", "Sample from the likeliest tokens with total probability p.", click.FloatRange(0, 1, min_open=True)
    ),
    option("--min-p", "Sample from tokens at least p times the likeliest.", click.FloatRange(0, 1)),
    option("--repetition-penalty", "Repetition penalty; 1: none.", click.FloatRange(0, min_open=True)),
    option("--num-beams", "Number of beams for beam search.", click.IntRange(1)),
    option("--stop stop_strings STRING", "Stop string. May be repeated.", multiple=True),
    option("--seed", "Random seed for sampling.", click.IntRange(0)),
)
ADAPTER = option(
    "--adapter PATH", "LoRA adapter for graphs of `export --lora-inputs`; any adapter with `--backend torch`."
)
BACKEND = (
    option("--backend", "Runtime to use.", ["onnx", "torch", "genai"], default="onnx"),
    option(
        "--export/--no-export first_export",
        "Whether a folder without graphs is exported once, into ~/.cache/llmconv, which links its weights, and a "
        "training checkpoint converted there before.  "
        "[default: yes]",
        default=True,
    ),
    option("--decode FILE", "Decode graph, for a prefill graph.", click.Path(path_type=Path)),
    option("--tokenizer PATH", "Folder of another tokenizer.  [default: the model's]"),
    ADAPTER,
    option("--prefix-tuning PATH", "Tuned prefix before every prompt: PEFT adapter, or PaddleNLP's pre_caches.npy."),
    option(
        "--speculate MODEL",
        "Guessed tokens that a call may run too: lookup (the text repeats itself), off, mtp (guesses of the head, see "
        "`export --mtp`), or the folder of a smaller model with the same vocabulary, which guesses. The text is the "
        "same.  [default: lookup]",
    ),
    option(
        "--form",
        "auto: run graphs in the form that is fastest on the CPU, made in memory, weights packed if memory allows; "
        "mapped: without a copy of weights; file: as they are.  [default: auto]",
        ["auto", "mapped", "file"],
    ),
    option("--device NAME", "Device of torch: cpu, cuda, cuda:1, …, with `--backend torch`."),
    option(
        "--dtype",
        "Dtype of the model, with `--backend torch`. Default: that of its weights.",
        ElementType(["float32", "float16", "bfloat16"]),
    ),
)
SESSION = (
    option("--provider NAME", "Provider of onnxruntime: cpu, cuda, …; the CPU runs the rest."),
    option("--threads", "Threads of onnxruntime or torch; 0 for one per core.", click.IntRange(0)),
    option("--session-config FILE", "Session options, .ini or JSON.", click.Path(path_type=Path)),
    option(
        "--timeout SECONDS",
        "Time limit for a run of a small graph; larger models and prompts get more. Default: 60.",
        click.FloatRange(0, min_open=True),
    ),
    option("--prepack", "Copy weights to a faster layout in memory. Default: map the files."),
    option(
        "--packed-cache",
        "Like `--prepack`, but write the copy to ~/.cache/llmconv once, and map it from then on: several "
        "processes share its memory.",
    ),
)
STAGES = (
    option(
        "--stage-at [N=]HOST:PORT",
        "Address of a stage that `llmconv serve-stage` runs, once per stage; the others run here, or with "
        "`--stage-at ray` in actors of a Ray cluster.",
        multiple=True,
    ),
    option(
        "--stage-timeout SECONDS",
        "A stage is lost after this time without a heartbeat. Default: 20.",
        click.FloatRange(0.1, 3600),
    ),
)


def picking(command: Command) -> Command:
    """Adds the options for sampling and length, whose defaults are in `generation_config.json`."""
    return _with(command, PICKING)


def running(command: Command) -> Command:
    """Adds the options for backend, session and stages in other processes."""
    return _with(command, (*BACKEND, *SESSION, *STAGES))


def running_adapters(command: Command) -> Command:
    """As `running`, with several adapters in place of one."""
    several = option(
        "--adapter adapters NAME=PATH",
        "LoRA adapter that requests choose by its name, for graphs of `export --lora-inputs`; may be repeated. A path "
        "alone is the adapter of all requests.",
        multiple=True,
    )
    return _with(command, (*(several if one is ADAPTER else one for one in BACKEND), *SESSION, *STAGES))


def adapters_of(given: Sequence[str]) -> tuple[str | None, dict[str, str]]:
    """The adapter of all requests, if any, and the paths of the others by their names; UsageProblem for names twice."""
    base, named = None, dict[str, str]()
    for one in given:
        name, mark, path = one.partition("=")
        if not mark or Path(one).exists():
            if base is not None:
                problem = f"`{base}` and `{one}` are both the adapter of all requests"
                raise UsageProblem(problem, hint="give names: `--adapter NAME=PATH`")
            base = one
        elif name in named:
            raise UsageProblem(f"two adapters have the name `{name}`", hint="`--adapter NAME=PATH`")
        else:
            named[name] = path
    return base, named


def session(command: Command) -> Command:
    return _with(command, SESSION)


def _with(command: Command, decorators: tuple[Callable[[Command], Command], ...]) -> Command:
    for decorator in reversed(decorators):
        command = decorator(command)
    return command


def settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """The given options without those that were left out; sampling options turn on `do_sample`."""
    fields = {name: value for name, value in given.items() if value is not None}
    if {"max_new_tokens", "max_length"} <= fields.keys():
        problem = "`--max-new-tokens` and `--max-length` both set the length"
        raise UsageProblem(problem, hint="give one of them: `--max-length` includes the prompt")
    if not fields.get("stop_strings"):
        fields.pop("stop_strings", None)
    if "temperature" in fields:
        fields["do_sample"] = fields["temperature"] > 0
    elif {"top_k", "top_p", "min_p"} & fields.keys():
        fields["do_sample"] = True
    return fields


def without_running(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options other than those of `running` and `--trust-remote-code`."""
    from llmconv.generation.generate import OF_RUNNING

    return {name: value for name, value in given.items() if name not in OF_RUNNING}


def with_graphs(model: str, given: dict[str, Any]) -> str:
    """The model, or the folder in the cache with its graphs, as for `speculate`; takes `first_export` out."""
    wanted = given.pop("first_export")
    others = ("decode", "adapter", "prefix_tuning", "stage_at", "trust_remote_code")
    if (smaller := given.get("speculate")) not in (None, "", "lookup", "mtp", "off"):
        same = {name: given[name] for name in ("backend", "trust_remote_code")}
        given["speculate"] = with_graphs(smaller, {**dict.fromkeys(others), **same, "first_export": wanted})
    if not wanted or given["backend"] != "onnx" or any(given[name] for name in others) or not Path(model).exists():
        return model
    from llmconv.generation.runners import graphs_in_cache

    if made := graphs_in_cache(Path(model)):
        click.get_current_context().meta.setdefault(MADE, {})[str(made)] = model
    return str(made) if made else model
