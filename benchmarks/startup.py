"""CPU time of commands that do little: what starting costs, against `import torch, transformers` of the same run."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from benchmarks.measure import FOLDER, Measurement, Target, llmconv, median, python, remove, report, run

ROUNDS = 3
CHECKPOINT = Path("examples/tiny-llama/ep4-ba2400-rank0.pt")
BASELINE = "`import torch, transformers`"
LIMITS = {
    "`inspect`": 0.15,
    "`formats`": 0.2,
    "`families`": 0.2,
    "refused: an option": 0.2,
    "refused: the model type": 0.2,
    "refused: the number of layers": 2.0,
    "`export`": 2.6,
}
"""Command to its largest CPU time, in times the baseline's; for `export` half of what it took when this was written."""

EXPORTER = "`torch.onnx.export`, logits alone"
PLAIN = """
import sys, torch
from transformers import AutoModelForCausalLM
class Logits(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model
    def forward(self, ids, mask):
        return self.model(input_ids=ids, attention_mask=mask, use_cache=False).logits
ids = torch.ones(2, 3, dtype=torch.int64)
axes = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
module = Logits(AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval())
with torch.no_grad():
    torch.onnx.export(module, (ids, ids), dynamic_shapes=(axes, axes), dynamo=True, verbose=False)
"""
"""What the library that `export` is built on takes for the same model, without a cache."""


def main() -> int:
    """Measures, prints the table, and returns 1 if a target is missed."""
    home = FOLDER / "startup"
    remove(home)
    model, unknown, output = home / "model", home / "unknown", home / "out"
    run(llmconv("to-hf", CHECKPOINT, "-o", model))
    shutil.copytree(model, unknown)
    config = json.loads((unknown / "config.json").read_text())
    (unknown / "config.json").write_text(json.dumps({**config, "model_type": "lama"}))
    other = home / "other"
    shutil.copytree(model, other)
    (other / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 9}))
    commands = {
        BASELINE: (python("import torch, transformers"), 0),
        "`inspect`": (llmconv("inspect", model), 0),
        "`formats`": (llmconv("formats"), 0),
        "`families`": (llmconv("families"), 0),
        "refused: an option": (llmconv("export", model, "-o", output, "--graph-name", "a/b"), 2),
        "refused: the model type": (llmconv("export", unknown, "-o", output), 3),
        "refused: the number of layers": (llmconv("export", other, "-o", output), 3),
        EXPORTER: (python(PLAIN, str(model)), 0),
        "`export`": (llmconv("export", model, "-o", output), 0),
    }
    runs: dict[str, list[Measurement]] = {name: [] for name in commands}
    for _ in range(ROUNDS):
        for name, (command, code) in commands.items():
            remove(output)
            runs[name].append(run(command, (code,)))
    remove(home)
    floor = median(runs[BASELINE], lambda one: one.cpu)
    rows = ["| job | CPU, s | times the baseline's | peak memory, MB |", "| --- | --- | --- | --- |"]
    for name, found in runs.items():
        cpu, peak = median(found, lambda one: one.cpu), max(one.peak_mb for one in found)
        rows.append(f"| {name} | {cpu:.2f} | {cpu / floor:.2f} | {peak:.0f} |")
    targets = [
        Target(f"{name}: CPU / {BASELINE}", median(runs[name], lambda one: one.cpu) / floor, limit)
        for name, limit in LIMITS.items()
    ]
    ratio = median(runs["`export`"], lambda one: one.cpu) / median(runs[EXPORTER], lambda one: one.cpu)
    targets.append(Target(f"`export`: CPU / {EXPORTER}", ratio, 1.2))
    words = "The README's tiny Llama; CPU time of the process (user and system), since other programs ran; medians of"
    body = f"{words} {ROUNDS} runs.\n\n" + "\n".join(rows)
    return report("startup", "Start of a command", body, targets)


if __name__ == "__main__":
    sys.exit(main())
