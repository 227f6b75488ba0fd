"""to-hf compared with other converters: transformers' Llama script on Meta's shards, LLM Foundry's on a Composer `.pt`.

LLM Foundry's script is not part of its package: `LLM_FOUNDRY` names a checkout of github.com/mosaicml/llm-foundry.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import environments
from benchmarks.formats import checkpoint as training_checkpoint
from benchmarks.measure import FOLDER, Measurement, Target, interleaved, llmconv, median, remove, report, run, table
from benchmarks.models import VOCABULARY
from benchmarks.to_hf import checkpoint as composer_checkpoint

ROUNDS = 2
SCRIPT = Path("scripts/inference/convert_composer_to_hf.py")
TOKENIZER = """
import sys
from sentencepiece import sentencepiece_model_pb2 as protobuf
model = protobuf.ModelProto()
kinds = {0: 2, 1: 3, 2: 3}
for number in range(int(sys.argv[2])):
    piece = ("<unk>", "<s>", "</s>")[number] if number < 3 else f"t{number}"
    model.pieces.add(piece=piece, score=-float(number), type=kinds.get(number, 1))
model.trainer_spec.model_type = 2
model.trainer_spec.vocab_size = int(sys.argv[2])
open(sys.argv[1], "wb").write(model.SerializeToString())
"""
"""Transformers' converter writes no model without a tokenizer of as many tokens as the embedding has."""


def transformers_converter(source: Path, output: Path) -> list[str]:
    """The command of the last script that converts, in an environment with its transformers."""
    interpreter = str(environments.python("transformers-4.47"))
    if not (source / "tokenizer.model").exists():
        run([interpreter, "-c", TOKENIZER, str(source / "tokenizer.model"), str(VOCABULARY)])
    script = ["-m", "transformers.models.llama.convert_llama_weights_to_hf", "--llama_version", "2"]
    sizes = ["--num_shards", str(len(list(source.glob("consolidated.*"))))]
    return [interpreter, *script, *sizes, "--input_dir", str(source), "--output_dir", str(output)]


def foundry_converter(source: Path, output: Path, checkout: Path) -> list[str]:
    """The command of LLM Foundry's script, in an environment with its package."""
    interpreter = str(environments.python("llm-foundry"))
    paths = ["--composer_path", str(source), "--hf_output_path", str(output), "--output_precision", "bf16"]
    return [interpreter, str(checkout / SCRIPT), *paths]


def compared(ours: str, theirs: str, results: dict[str, list[Measurement]]) -> list[Target]:
    """How much faster and smaller llmconv is."""
    walls = [median(results[name], lambda item: item.wall) for name in (ours, theirs)]
    peaks = [max(item.peak_mb for item in results[name]) for name in (ours, theirs)]
    return [
        Target(f"{theirs}: times slower than llmconv", walls[1] / walls[0], 3, at_least=True),
        Target(f"{theirs}: times the memory of llmconv", peaks[1] / peaks[0], 5, at_least=True),
    ]


def main() -> int:
    """Measures, prints the table, and returns 1 if a target is missed."""
    output, checkout = FOLDER / "out", os.environ.get("LLM_FOUNDRY")
    meta, composer = training_checkpoint("meta", 2), composer_checkpoint()
    ours, theirs = ("`llmconv to-hf` of meta", "`llmconv to-hf` of composer"), ["transformers 4.47's converter"]
    commands: dict[str, Sequence[str]] = {
        ours[0]: llmconv("to-hf", meta, "-o", output),
        theirs[0]: transformers_converter(meta, output),
    }
    note = "LLM Foundry's script was left out: `LLM_FOUNDRY` names no checkout of it."
    if checkout:
        theirs.append("LLM Foundry's script")
        commands[ours[1]] = llmconv("to-hf", composer, "-o", output)
        commands[theirs[1]] = foundry_converter(composer, output, Path(checkout))
        note = f"The Composer checkpoint has {composer.stat().st_size / 1e9:.1f} GB with its Adam state."
    results = interleaved(commands, ROUNDS, output)
    for left in Path().glob("tokenizer-save-dir-*"):  # LLM Foundry's script never removes them
        remove(left)
    targets = [target for pair in zip(ours, theirs, strict=False) for target in compared(*pair, results)]
    body = f"A random 1.1 B Llama (2.2 GB of bfloat16); medians. {note}\n\n{table(results)}"
    return report("rivals", "to-hf compared with other converters", body, targets)


if __name__ == "__main__":
    sys.exit(main())
