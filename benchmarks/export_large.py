"""export of a Llama 3.1 405B: 126 layers, 810 GB of bfloat16 in shards that are holes, since only headers are read."""

from __future__ import annotations

import json
import sys
from math import prod
from pathlib import Path

from benchmarks.export import GRAPHS
from benchmarks.measure import FOLDER, Target, interleaved, llmconv, median, report, table
from llmconv.files.safetensors_file import encode_header
from llmconv.tensors import BY_NAME

LAYERS, HIDDEN, INTERMEDIATE, VOCABULARY, HEADS, KV_HEADS = 126, 16384, 53248, 128256, 128, 8
ROUNDS = 3
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}


def sparse(layers: int = LAYERS) -> Path:
    """The folder: a shard per layer, and one for the rest."""
    folder = FOLDER / ("sparse-405b" if layers == LAYERS else f"sparse-405b-{layers}")
    folder.mkdir(parents=True, exist_ok=True)
    shards = [_layer(number) for number in range(layers)]
    rest = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCABULARY, HIDDEN),
    }
    weight_map: dict[str, str] = {}
    for number, shapes in enumerate([*shards, rest], start=1):
        name = f"model-{number:05}-of-{len(shards) + 1:05}.safetensors"
        header = encode_header({tensor: (BY_NAME["bfloat16"], shape) for tensor, shape in shapes.items()})
        with open(folder / name, "wb") as file:
            file.write(header)
            file.truncate(len(header) + 2 * sum(map(prod, shapes.values())))
        weight_map |= dict.fromkeys(shapes, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": layers}))
    return folder


def _layer(number: int) -> dict[str, tuple[int, ...]]:
    kv = HIDDEN // HEADS * KV_HEADS
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (kv, HIDDEN),
        "self_attn.v_proj": (kv, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
        "mlp.up_proj": (INTERMEDIATE, HIDDEN),
        "mlp.down_proj": (HIDDEN, INTERMEDIATE),
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
    }
    return {f"model.layers.{number}.{name}.weight": shape for name, shape in shapes.items()}


def main() -> int:
    """Measures, prints the table, and returns 1 if a target is missed."""
    folder = sparse()
    commands = {"`llmconv export`": llmconv("export", folder, "--prefill", "--incremental", "--overwrite")}
    results = interleaved(commands, ROUNDS, FOLDER / "nothing")
    (runs,) = results.values()
    written = sum((folder / name).stat().st_size for name in GRAPHS)
    targets = [
        Target("seconds", median(runs, lambda item: item.wall), 40),
        Target("peak RSS, MB", max(item.peak_mb for item in runs), 1500),
    ]
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    text = f"Prefill and decode graph of {LAYERS} layers over {size / 1e9:.0f} GB of bfloat16 in {LAYERS + 1} shards;"
    return report("export_large", "export of 405 B", f"{text} {written:,} bytes written.\n\n{table(results)}", targets)


if __name__ == "__main__":
    sys.exit(main())
