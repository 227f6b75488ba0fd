"""What quantization costs: the divergence of each candidate's next token from that of float32, on the same text."""

from __future__ import annotations

import sys
import tempfile
from contextlib import closing
from pathlib import Path

import numpy as np

from benchmarks.measure import FOLDER, Target, report
from benchmarks.quantized_candidates import (
    A8W8,
    A8W8_CALIBRATED,
    FLOAT32,
    GENAI,
    INT4,
    INT4_32,
    INT4_32_HEAD,
    INT4_AWQ,
    INT4_HEAD,
    INT4_SEARCH,
    INT8,
    MIXED,
    Q4_0,
    Q4_K_M,
    SMALL,
    Candidate,
    Worker,
    candidates,
)
from benchmarks.smollm2 import smollm2
from llmconv.runtime.tokenizer import load_tokenizer
from llmconv.sample_texts import evaluation_text
from llmconv.tensors import Array
from llmconv.verify.other_exporters.quantized.accuracy import TokenCosts
from llmconv.verify.results import AccuracyCost
from llmconv.verify.sigma import log_probabilities

PIECES, PIECE = 4, 512
COMPARED = (
    *(INT8, A8W8, A8W8_CALIBRATED, MIXED, INT4_32_HEAD, INT4_32, INT4_HEAD, INT4, INT4_AWQ, INT4_SEARCH, SMALL),
    *(GENAI, Q4_0, Q4_K_M),
)


def main() -> int:
    """Measures, prints the table, and returns 1 if a target is missed."""
    made = candidates((FLOAT32, *COMPARED))
    ids = load_tokenizer(smollm2())(evaluation_text(), verbose=False)["input_ids"][: PIECES * PIECE]
    pieces = np.array(ids, dtype=np.int64).reshape(PIECES, 1, PIECE)
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        wanted = logits(made.pop(FLOAT32), pieces, Path(folder) / "float32")
        costs = {name: cost(name, one, pieces, wanted, Path(folder)) for name, one in made.items()}
    body = "\n".join(
        [
            f"SmolLM2-135M-Instruct, {PIECES * PIECE:,} tokens of the evaluation text that ships with llmconv, in",
            f"pieces of {PIECE}; KL divergence of the next token from the float32 graphs' in nats. Activations are",
            "rounded as each runtime does. In llmconv's and GenAI's files the embedding is float32",
            "(113 MB), in llama.cpp's it is quantized.",
            "",
            "| graphs | file, MB | mean | median | p99 | same likeliest token | perplexity / float32's |",
            "| --- | --- | --- | --- | --- | --- | --- |",
            *(row(name, made[name], found) for name, found in costs.items()),
        ]
    )
    return report("quantized_loss", "Divergence of quantized graphs", body, targets(costs))


def logits(candidate: Candidate, pieces: Array, files: Path) -> list[Array]:
    """Logits of every piece, float32 `[tokens, vocabulary]`, mapped from files in a folder that is made now."""
    files.mkdir()
    with closing(Worker(candidate)) as worker:
        for number, piece in enumerate(pieces):
            worker.ask(ids=piece[0].tolist(), to=str(files / f"{number}.npy"))
    return [np.load(files / f"{number}.npy", mmap_mode="r") for number in range(len(pieces))]


def cost(name: str, candidate: Candidate, pieces: Array, wanted: list[Array], folder: Path) -> AccuracyCost:
    """The figures of one candidate."""
    costs = TokenCosts(name, "evaluation text")
    found = logits(candidate, pieces, folder / candidate.path.name)
    for piece, exact, one in zip(pieces, wanted, found, strict=True):
        model, graph = (log_probabilities(np.asarray(values, np.float64)) for values in (exact, one))
        costs.add(model, graph, piece[0, 1:])
    return costs.summary(is_text=True)


def row(name: str, candidate: Candidate, found: AccuracyCost) -> str:
    """A Markdown row."""
    nats, size = found.divergence, candidate.weights.stat().st_size / 1e6
    ratio = f"{found.perplexities.ratio.value:.3f}" if found.perplexities else ""
    spread = f"{nats['mean']:.4f} ± {found.divergence_error:.4f} | {nats['median']:.4f} | {nats['p99']:.3f}"
    return f"| {name} | {size:.0f} | {spread} | {found.agreement:.1%} | {ratio} |"


def targets(costs: dict[str, AccuracyCost]) -> list[Target]:
    """llmconv's 4 bits cost no more than others' with about as many bits."""
    mean = {name: cost.divergence["mean"] for name, cost in costs.items()}
    return [
        Target(f"mean divergence of {ours} / of {other}", mean[ours] / mean[other], 1.0)
        for ours, other in ((INT4, GENAI), (INT4, Q4_0), (MIXED, Q4_K_M))
        if other in mean
    ]


if __name__ == "__main__":
    sys.exit(main())
