"""`llmconv export`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import click

from llmconv.cli import options
from llmconv.cli.command_group import Command
from llmconv.cli.options import option
from llmconv.cli.verdict import print_report, printer, require_verifiable, say_it_stays, verify_export
from llmconv.errors import LlmconvError
from llmconv.progress import is_quiet, say

if TYPE_CHECKING:
    from llmconv.export.export_options import Exported, ExportOptions


@click.command("export", cls=Command)
@click.argument("model")
@option(
    "-o --output PATH",
    "New folder, on this machine or in an object store; by default graphs go into MODEL, or next to a GGUF file.",
    options.OutputFolder(),
)
@option(
    "--task",
    "embed, classify, rerank: model.onnx without a cache returns embeddings, classes or scores of texts.",
    ["generate", "embed", "classify", "rerank"],
    default="generate",
)
@option("--no-cache", "Write scoring.onnx alone: logits of whole texts, without a cache.")
@option("--prefill", "Write prefill.onnx.")
@option("--incremental", "Write decode.onnx.")
@option("--unified", "Write model.onnx, one graph for both.")
@option("--graph-name ROLE=FILE", "Name of a graph, such as decode=step.onnx. May be repeated.", multiple=True)
@option(
    "--layout CLIENT",
    "Client that will open the folder: onnxruntime (default), genai, optimum or transformersjs. May be repeated.",
    multiple=True,
    shell_complete=options.layouts,
)
@option(
    "--embeds", "Graphs take embeddings; embeddings.onnx computes those of tokens. Always so for multimodal models."
)
@option("--mtp", "Write mtp.onnx, too: the layer that predicts a further token, for `generate --speculate mtp`.")
@option("--last-logits", "Return the logits of the last position only.")
@option("--postprocess argmax|topk:K", "Choose tokens in the graph: outputs `tokens` and `scores`.")
@option("--stages K", "Divide each graph into K graphs, for K devices.", click.IntRange(1), default=1)
@option(
    "--lora-inputs NAMES",
    "Linear layers that take the factors of LoRA adapters as optional inputs: all-linear, or q_proj,v_proj,…",
    default="",
)
@option("--prefix PATH", "Virtual tokens before every prompt: PEFT adapter or pre_caches.npy.")
@option(
    "--opset", "Version of the standard operators; 21 is for older runtimes.  [default: 23, static: 24]", [21, 23, 24]
)
@option("--shapes", "static: all axes are fixed numbers.", ["dynamic", "static"], default="dynamic")
@option("--batch-size", "Static: sequences per call. [default: 1]", click.IntRange(1))
@option("--max-seq-len", "Static: number of tokens that the cache holds.", click.IntRange(1))
@option("--prompt-len", "Static: new tokens per call of prefill.onnx.", click.IntRange(1))
@option(
    "--cache",
    "shared-buffer: past and present are one buffer that is filled in place.  [default: growing, or --target's]",
    ["growing", "shared-buffer"],
)
@option(
    "--target",
    "Provider of onnxruntime that runs the graphs: options that suit it, and what it leaves to the CPU is listed.",
    ["ort-cpu", "ort-cuda", "ort-webgpu", "ort-dml"],
)
@option("--strict-target", "Refuse graphs of which the target leaves a part to the CPU.")
@option(
    "--precision",
    "Dtype that the graphs compute in, and of their cache.  [default: float32, or --target's]",
    options.ElementType(["float32", "float16", "bfloat16"]),
)
@option(
    "--logits-dtype",
    "Dtype of the logits: float32 or that of --precision.",
    options.ElementType(["float32", "float16", "bfloat16"]),
    default="float32",
)
@options.dtype
@option(
    "--quant",
    "Store the matrices in OUT as codes of 8 bits; of 4, with a head of 8; also sensitive ones of 8; all of 4; of "
    "8, with activations of 8 bits: the fastest prompts.",
    ["int8", "int4", "int4-mixed", "int4-small", "a8w8"],
)
@option(
    "--quant-block N",
    "Weights that share a scale: 16, 32, 64, 128 or 256.  [default: 32, int4: 64, int4-small: 128]",
    int,
)
@option("--symmetric", "Store no zero points.")
@option("--quant-exclude PATTERN", "Weights that stay as they are; may be repeated.", multiple=True)
@option("--quant-bits PATTERN=8", "Bits of the weights with such names: 4 or 8.", multiple=True)
@option(
    "--kv-cache", "int8: keep keys and values as codes of 8 bits in a shared buffer, in the ranges of a text.", ["int8"]
)
@option(
    "--calibrate FILE|default",
    "Text that shows which columns of weights matter, and the ranges of activations (a8w8), keys and values; "
    "`default`: llmconv's own.",
)
@option(
    "--static-activations",
    "With --quant a8w8 and --calibrate: round activations in ranges of the text (QDQ), as NPUs need.",
)
@option(
    "--method",
    "search: the scales with the least squared error; rtn: from the extreme values; gptq: as search, and later "
    "columns make up for the errors of earlier ones on the text of --calibrate; awq: as search, with norms and the "
    "matrices behind them scaled so that this text loses least; awq-columns: awq by the mean squares of columns "
    "alone, for which 256 tokens of llmconv's own text are enough.  [default: awq-columns for 4 bits, else search]",
    ["awq-columns", "search", "rtn", "gptq", "awq"],
)
@options.max_shard_size
@option(
    "--graphs-only",
    "Write no weights into OUT, where the files of MODEL are put by their names; reads only their headers.",
)
@options.overwrite
@options.resume
@option("--dry-run", "Make and check the graphs, print the files and their sizes, and stop.")
@option("--verify", "Then verify the graphs as `llmconv verify` does; its verdict is the exit code.")
@options.trust_remote_code
@options.as_json
@options.talk
def command(model: str, output: Path | None, as_json: bool, verify: bool, **given: Unpack[ExportOptions]) -> None:
    """Write ONNX graphs that map the weights of MODEL, a Hugging Face folder.

    Three layers are traced and the others are replicated, so the cost does not grow with depth. Graphs are written next
    to the weights and copy none of them; with -o the weights are streamed once into a new folder, cast to --dtype. They
    compute in --precision. Without --prefill, --incremental or --unified the first two are written, or those that
    --layout needs: genai, optimum and transformersjs need --unified. docs/clients.md describes how to open the folder
    with each client.

    With --verify the exit code is that of `llmconv verify`, 1 for a difference and 5 if nothing could be compared; the
    export stays in place in any case.
    """
    from llmconv.causal_lm import require_causal_folder
    from llmconv.files.sources import require_own_folder
    from llmconv.memory import share_one_heap

    if verify:
        require_verifiable(output, given)
    share_one_heap()
    if output is None:  # both before importing torch, which takes seconds
        require_own_folder(model)
    require_causal_folder(Path(model), given["task"])
    from llmconv.export import export

    exported = export(model, output, **given)
    if not as_json:
        _print(exported)
    elif not verify:
        options.print_json(_result(exported))
    if verify:
        # the report of `--verify`, printed; with `--json` in one object with the export, null after an error
        quiet, show = is_quiet(), printer(every=False)
        try:
            report = verify_export(exported.folder, model, given, None if as_json or quiet else show)
        except LlmconvError:
            if as_json:
                options.print_json({**_result(exported), "verify": None})
            raise
        if as_json:
            options.print_json({**_result(exported), "verify": report.as_dict()})
        else:
            print_report(report, show, quiet=quiet)
        if not report:
            say_it_stays(exported.folder)
        click.get_current_context().exit(report.exit_code)


def _result(exported: Exported) -> dict[str, Any]:
    sizes = exported.sizes
    mapped, copied = exported.weight_bytes_mapped, exported.weight_bytes_written
    return {
        "folder": str(exported.place),
        "graphs": {role: names[0] if len(names) == 1 else names for role, names in exported.graphs.items()},
        "client_files": exported.client_files,
        "files": dict(exported.files),
        "graph_bytes": sizes.graphs if sizes else 0,
        "weight_bytes": exported.weight_bytes,
        "weight_bytes_mapped": mapped,
        "weight_bytes_copied": copied,
        "weight_bytes_not_copied": max(mapped - copied, 0),
        **({"quantized": exported.quantized.fields()} if exported.quantized else {}),
        **({"missing": dict(exported.missing)} if exported.missing else {}),
        "layers_traced": exported.traced_layers,
        "layers": exported.num_layers,
        "dry_run": sizes is None,
    }


def _print(exported: Exported) -> None:
    """Prints the files, or those that would be written, and a summary to stderr."""
    is_dry = exported.sizes is None
    if is_dry:
        count, total = len(exported.files), sum(exported.files.values())
        click.echo(f"would write {exported.place}: {count} file{'s' * (count != 1)}, {total:,} bytes")
        for name, size in exported.files.items():
            click.echo(f"  {name}  {size:,} bytes")
    else:
        for name in (*(name for names in exported.graphs.values() for name in names), *exported.client_files):
            click.echo(f"{exported.place}/{name}")
    verb = "would map" if is_dry else "map" if len(exported.graphs) != 1 else "maps"
    count = len(exported.graphs)
    say(
        f"{count} graph{'s' * (count != 1)} {verb} {exported.weight_bytes_mapped:,} bytes of weights, "
        f"{exported.weight_bytes_written:,} written; {exported.traced_layers} of {exported.num_layers} layers traced"
    )
    if exported.quantized:
        say(exported.quantized.line)
    if exported.missing:
        first, count = next(iter(exported.missing)), len(exported.missing)
        names = f"`{first}`" if count == 1 else f"{count} files, `{first}` to `{list(exported.missing)[-1]}`"
        size_text = f"{sum(exported.missing.values()):,} bytes"
        click.echo(f"before they are run, put the model's weights next to them: {names}, {size_text}", err=True)
