"""Whether the cost of an export grows with depth: a 1.1 B float32 Llama of 22 layers, and the same with 6."""

from __future__ import annotations

import json
import sys
from math import prod
from pathlib import Path

from benchmarks.export import GRAPHS
from benchmarks.measure import FOLDER, Target, interleaved, llmconv, median, report, table
from benchmarks.models import CONFIG, shapes
from llmconv.files.safetensors_file import encode_header
from llmconv.tensors import BY_NAME

ROUNDS = 5


def sparse(layers: int, dtype: str = "float32", name: str = "") -> Path:
    """A folder whose weights are a hole in a file: the export reads headers only, so no byte is needed.

    Args:
        layers: of the model.
        dtype: of its weights.
        name: end of the folder's name.
    """
    folder = FOLDER / f"sparse-{layers}{name}"
    folder.mkdir(parents=True, exist_ok=True)
    dropped = tuple(f"model.layers.{layer}." for layer in range(layers, CONFIG_LAYERS))
    kept = {name: shape for name, shape in shapes().items() if not name.startswith(dropped)}
    header = encode_header({name: (BY_NAME[dtype], shape) for name, shape in kept.items()})
    with open(folder / "model.safetensors", "wb") as file:
        file.write(header)
        file.truncate(len(header) + BY_NAME[dtype].numpy.itemsize * sum(map(prod, kept.values())))
    (folder / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": layers, "dtype": dtype}))
    return folder


CONFIG_LAYERS = int(str(CONFIG["num_hidden_layers"]))


def main() -> int:
    """Measures, prints the table, and returns 1 if a target is missed."""
    deep, shallow = sparse(22), sparse(6)
    commands = {
        f"{layers} layers": llmconv("export", folder, "--prefill", "--incremental", "--overwrite")
        for layers, folder in ((22, deep), (6, shallow))
    }
    results = interleaved(commands, ROUNDS, FOLDER / "nothing")
    wall = {name: median(runs, lambda item: item.wall) for name, runs in results.items()}
    written = sum((deep / name).stat().st_size for name in GRAPHS)
    targets = [
        Target("22 layers, seconds", wall["22 layers"], 15),
        Target("22 layers, peak RSS, MB", max(item.peak_mb for item in results["22 layers"]), 1000),
        Target("22 layers, MB written", written / 1e6, 3),
        Target("22 layers / 6 layers", wall["22 layers"] / wall["6 layers"], 1.3),
    ]
    weights = "4.4 GB of weights that are a hole in a file, since only headers are read; none copied"
    body = f"A 1.1 B Llama in float32 ({weights}); {written:,} bytes written.\n\n" + table(results)
    return report("export_depth", "export at two depths", body, targets)


if __name__ == "__main__":
    sys.exit(main())
