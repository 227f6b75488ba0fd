"""merge-lora of a rank-16 adapter on all linear layers of a 1.1 B bfloat16 Llama, against `cp`, PEFT and mergekit."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks import environments
from benchmarks.measure import FOLDER, SETTLE, Target, interleaved, llmconv, median, python, remove, report, run, table
from benchmarks.models import adapter, base
from benchmarks.rounding import share

ROUNDS = 5
OTHERS_ROUNDS = 3

PEFT = """
import sys, torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
PeftModel.from_pretrained(model, sys.argv[2]).merge_and_unload().save_pretrained(sys.argv[3])
"""
OURS, PEFTS, MERGEKITS = "`llmconv merge-lora`", "PEFT `merge_and_unload` + `save_pretrained`", "mergekit, passthrough"


def mergekit(model: Path, lora: Path, output: Path) -> list[str]:
    """The command that merges with mergekit: what it merges with PEFT on the way goes into `output` too."""
    recipe = FOLDER / "mergekit.yml"
    source = f"{model.absolute()}+{lora.absolute()}"
    recipe.write_text(f"merge_method: passthrough\ndtype: bfloat16\nmodels:\n  - model: {source}\n")
    program = environments.python("mergekit").with_name("mergekit-yaml")
    return [str(program), str(recipe), str(output), "--no-copy-tokenizer", "--lora-merge-cache", str(output / "cache")]


def main() -> int:
    """Measures, prints the tables, and returns 1 if a target is missed."""
    model, lora, output = base(), adapter(), FOLDER / "out"
    ours = {
        OURS: llmconv("merge-lora", model, lora, "-o", output),
        "`cp` of the model": ["cp", "-r", str(model), str(output)],
        "`import torch`": python("import torch"),
    }
    others = {PEFTS: python(PEFT, str(model), str(lora), str(output)), MERGEKITS: mergekit(model, lora, output)}
    results = interleaved(ours, ROUNDS, output) | interleaved(others, OTHERS_ROUNDS, output)
    walls = [median(runs, lambda item: item.wall) for runs in results.values()]
    shares = {}
    for name in (OURS, *others):
        remove(output)
        run({**ours, **others}[name])
        shares[name] = 100 * share(model, lora, output)
    remove(output)
    targets = [
        Target("wall time / (`cp` + `import torch`)", walls[0] / (walls[1] + walls[2]), 1.2),
        Target("peak RSS, MB", max(item.peak_mb for item in results[OURS]), 600),
        Target("times faster than PEFT", walls[3] / walls[0], 4, at_least=True),
        Target("times faster than mergekit", walls[4] / walls[0], 4, at_least=True),
        Target("elements that are the float64 sum, rounded, %", shares[OURS], 100, at_least=True),
    ]
    rows = [f"| {name} | {value:.4f} |" for name, value in shares.items()]
    body = "\n".join(
        [
            "A random 1.1 B Llama (bfloat16, 2.2 GB), a rank-16 adapter on all linear layers; medians of runs in turn,",
            f"{SETTLE} s apart. mergekit merges with PEFT into a cache first, and copies that.\n",
            table(results),
            "\n| merged by | elements that are the float64 sum, rounded, % |\n| --- | --- |",
            *rows,
        ]
    )
    return report("merge_lora", "merge-lora", body, targets)


if __name__ == "__main__":
    sys.exit(main())
