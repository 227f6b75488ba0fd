"""merge-lora of a rank-16 adapter on all linear layers of a 1.1 B bfloat16 Llama, against `cp` and against PEFT."""

from __future__ import annotations

import sys

from benchmarks.measure import FOLDER, Target, interleaved, llmconv, median, python, report, table
from benchmarks.models import adapter, base

ROUNDS = 3
PEFT_ROUNDS = 1

PEFT = """
import sys, torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
PeftModel.from_pretrained(model, sys.argv[2]).merge_and_unload().save_pretrained(sys.argv[3])
"""


def main() -> int:
    """Measures, prints the table, and returns 1 where a target is missed."""
    model, lora, output = base(), adapter(), FOLDER / "out"
    ours = {
        "`llmconv merge-lora`": llmconv("merge-lora", model, lora, "-o", output),
        "`cp` of the model": ["cp", "-r", str(model), str(output)],
        "`import torch`": python("import torch"),
    }
    results = interleaved(ours, ROUNDS, output)
    peft = {"PEFT `merge_and_unload` + `save_pretrained`": python(PEFT, str(model), str(lora), str(output))}
    results |= interleaved(peft, PEFT_ROUNDS, output)
    walls = [median(runs, lambda item: item.wall) for runs in results.values()]
    targets = [
        Target("wall time / (`cp` + `import torch`)", walls[0] / (walls[1] + walls[2]), 1.3),
        Target("peak RSS, MB", max(item.peak_mb for item in results["`llmconv merge-lora`"]), 700),
        Target("times faster than PEFT", walls[3] / walls[0], 3, at_least=True),
    ]
    body = "A random 1.1 B Llama (bfloat16, 2.2 GB), a rank-16 adapter on all linear layers; medians.\n\n" + table(
        results
    )
    return report("merge_lora", "merge-lora", body, targets)


if __name__ == "__main__":
    sys.exit(main())
