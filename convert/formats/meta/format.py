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
from llmconv.convert.algebra.operations import (
    equal,
    listing,
    rename,
    require,
)
from llmconv.convert.formats import Format
from llmconv.convert.formats.meta.config import PARAMS, WeightSizes, is_scaled, read_params, to_config
from llmconv.convert.formats.meta.names import LLAMA
from llmconv.convert.formats.meta.read import SHARD, _check_shapes, _differing_norms, _file_order, _join, _open_shards
from llmconv.convert.formats.meta.tokenizer import MetaTokenizer, find_tokenizer, load_tokenizer, without_tokenizer
from llmconv.convert.formats.meta.write import save
from llmconv.convert.models.config_file import without_code
from llmconv.convert.state_dicts.training_files import left_beside
from llmconv.tensors import LazyTensor


def _detect(path: Path) -> bool:
    return path.is_dir() and any(SHARD.fullmatch(entry.name) for entry in path.iterdir())


def _open(path: Path, config: Mapping[str, Any], tokenizer: Path | None) -> Checkpoint:
    shards = _open_shards(path)
    stored = read_json(path / "params.json") if (path / "params.json").is_file() else {}
    params = read_params({**stored, **{name: value for name, value in config.items() if name in PARAMS}}, path.name)
    renamed = rename(shards[0], LLAMA, path.name)
    layers = min(int(params["n_layers"]), len(renamed))  # of a billion layers most are missing already
    expected = [
        row.format(layer)
        for row in LLAMA.values()
        if row
        for layer in range(layers + 1)
        if layer < int(params["n_layers"])
    ]
    require(dict.fromkeys(expected), renamed, path.name)
    kv_heads = _check_shapes(path, shards, params)
    tensors = {
        target: _join(path, source, shards, params, kv_heads)
        for target, source in sorted(renamed.items(), key=lambda pair: _file_order(pair[0]))
    }
    sizes = WeightSizes(
        tensors["model.embed_tokens.weight"].shape[0],
        tensors["model.layers.0.mlp.gate_proj.weight"].shape[0],
        kv_heads,
    )
    settings = to_config(params, sizes, path.name)
    _tie(tensors, settings)
    words, warnings = _tokenizer(path, tokenizer, params, sizes)
    extra, dropped = without_code({name: value for name, value in config.items() if name not in PARAMS})
    if dropped:
        warnings.append(f"dropped {listing(dropped)} from the configuration: no code comes from a checkpoint")
    settings |= {"bos_token_id": words.bos, "eos_token_id": words.eos} | extra
    warnings += _differing_norms(shards)
    side_files = {**words.files, **_generation_config(words)}
    left = [name for name in shards[0] if name.endswith("rope.freqs")]
    return Checkpoint(
        path,
        FORMAT.name,
        tensors,
        settings,
        side_files,
        tuple(warnings),
        shards=len(shards),
        dropped=(*([f"rotary frequencies ({listing(left)})"] if left else []), *left_beside(path)),
    )


def _tie(tensors: dict[str, LazyTensor], settings: dict[str, Any]) -> None:
    """Drops an output head that equals the embedding (Llama 3.2 1B and 3B), as transformers stores tied weights."""
    if equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"]):
        del tensors["lm_head.weight"]
        settings["tie_word_embeddings"] = True


def _tokenizer(
    path: Path, given: Path | None, params: Mapping[str, Any], sizes: WeightSizes
) -> tuple[MetaTokenizer, list[str]]:
    place = given or find_tokenizer(path)
    if place is None:
        words = without_tokenizer(sizes.vocabulary)
        return words, [f"`{path.name}` has no `tokenizer.model`; give one with `--tokenizer` if you need it"]
    words = load_tokenizer(place, since_3_1=is_scaled(params))
    warnings = list(words.warnings)
    if words.size > sizes.vocabulary:
        warnings.append(
            f"the tokenizer has {words.size} tokens, the embedding {sizes.vocabulary}: is it another model's?"
        )
    return words, warnings


def _generation_config(words: MetaTokenizer) -> dict[str, bytes]:
    if words.bos is None:
        return {}
    stops = list(words.stops) if len(words.stops) > 1 else words.eos
    content = {"bos_token_id": words.bos, "eos_token_id": stops}
    return {"generation_config.json": (json.dumps(content, indent=2) + "\n").encode()}


FORMAT = Format(
    name="meta",
    title="Meta's Llama: a folder of `consolidated.NN.pth` and `params.json`",
    covers="Llama 1, 2, 3, 3.1, 3.2 (text), Code Llama; any number of shards; its tokenizer, sentencepiece or tiktoken",
    detect=_detect,
    open=_open,
    save=save,
)
