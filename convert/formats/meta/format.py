"""Meta's model-parallel Llama: a folder of `consolidated.NN.pth` shards and `params.json`.

Layout (meta-llama/llama `model.py` with fairscale's parallel layers; llama-models): column-parallel weights are split
along dim 0, row-parallel ones along dim 1, the embedding along dim 1 (Llama 1, 2) or dim 0 (Llama 3), norms repeated.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmconv.checkpoint import Checkpoint, read_json
from llmconv.convert.algebra.operations import rename, require
from llmconv.convert.formats import Format
from llmconv.convert.formats.meta.config import PARAMS, WeightSizes, is_scaled, read_params, to_config
from llmconv.convert.formats.meta.read import LLAMA, SHARD, check_shapes, differing_norms, file_order, join, open_shards
from llmconv.convert.formats.meta.tokenizer import MetaTokenizer, find_tokenizer, tokenizer_for
from llmconv.convert.formats.meta.write import save
from llmconv.convert.models.config_file import without_code
from llmconv.convert.state_dicts.safetensors_files import training_files_in
from llmconv.errors import listing


def _detect(path: Path) -> bool:
    return path.is_dir() and any(SHARD.fullmatch(entry.name) for entry in path.iterdir())


def _open(path: Path, config: Mapping[str, Any], tokenizer: Path | None) -> Checkpoint:
    shards = open_shards(path)
    stored = read_json(path / "params.json") if (path / "params.json").is_file() else {}
    params = read_params({**stored, **{name: value for name, value in config.items() if name in PARAMS}}, path.name)
    renamed = rename(shards[0], LLAMA, path.name)
    # one layer more than there are tensors is enough to report missing keys, even if a billion layers are declared
    layers = min(int(params["n_layers"]), len(renamed) + 1)
    expected = [target.format(layer) for target in LLAMA.values() if target for layer in range(layers)]
    require(dict.fromkeys(expected), renamed, path.name)
    kv_heads = check_shapes(path, shards, params)
    tensors = {
        target: join(path, source, shards, params, kv_heads)
        for target, source in sorted(renamed.items(), key=lambda pair: (*file_order(pair[0]), pair[0]))
    }
    sizes = WeightSizes(
        tensors["model.embed_tokens.weight"].shape[0],
        tensors["model.layers.0.mlp.gate_proj.weight"].shape[0],
        kv_heads,
    )
    settings = to_config(params, sizes, path.name)
    settings["tie_word_embeddings"] = None  # Llama 3.2 1B and 3B hold one matrix twice: the values decide
    tokens, warnings = tokenizer_for(
        tokenizer or find_tokenizer(path), sizes.vocabulary, path.name, since_3_1=is_scaled(params)
    )
    extra, dropped = without_code({name: value for name, value in config.items() if name not in PARAMS})
    if dropped:
        warnings.append(f"dropped {listing(dropped)} from the configuration: no code comes from a checkpoint")
    settings |= {"bos_token_id": tokens.bos, "eos_token_id": tokens.eos} | extra
    warnings += differing_norms(shards)
    side_files = {**tokens.files, **_generation_config(tokens)}
    left = [name for name in shards[0] if name.endswith("rope.freqs")]
    return Checkpoint(
        path,
        FORMAT.name,
        tensors,
        settings,
        side_files,
        tuple(warnings),
        shards=len(shards),
        dropped=(*([f"rotary frequencies ({listing(left)})"] if left else []), *training_files_in(path)),
    )


def _generation_config(tokens: MetaTokenizer) -> dict[str, bytes]:
    if tokens.bos is None:
        return {}
    stops = list(tokens.stops) if len(tokens.stops) > 1 else tokens.eos
    content = {"bos_token_id": tokens.bos, "eos_token_id": stops}
    return {"generation_config.json": (json.dumps(content, indent=2) + "\n").encode()}


FORMAT = Format(
    name="meta",
    title="Meta's Llama: a folder of `consolidated.NN.pth` and `params.json`",
    covers="Llama 1, 2, 3, 3.1, 3.2 (text), Code Llama; any number of shards; its tokenizer, sentencepiece or tiktoken",
    detect=_detect,
    open=_open,
    save=save,
)
