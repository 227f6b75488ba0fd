"""Meta's model-parallel Llama, read and written: a folder of `consolidated.NN.pth` shards, `params.json` and tokenizer.

Layout (meta-llama/llama `model.py` with fairscale's parallel layers; llama-models): column-parallel weights are split
along dim 0, row-parallel ones along dim 1, the embedding along dim 1 (Llama 1, 2) or dim 0 (Llama 3), norms repeated.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmconv.checkpoint import Checkpoint, read_json
from llmconv.convert.algebra import (
    inverse_order,
    inverted,
    permute_rows,
    rename,
    require,
    rope_order,
    slice_rows,
    split,
)
from llmconv.convert.formats import Format
from llmconv.convert.formats.meta.read import (
    LLAMA,
    PARAMS,
    SHARD,
    WeightSizes,
    check_shapes,
    config_of,
    differing_norms,
    file_order,
    is_scaled,
    join,
    open_shards,
    params_of,
    read_params,
    split_dim,
    to_config,
)
from llmconv.convert.models.config_file import json_object, plain_fields
from llmconv.convert.models.head_and_dtype import with_head
from llmconv.convert.models.model_config import LlamaLikeConfig, read_decoder, refuse_shards
from llmconv.convert.state_dicts.files import training_files_in
from llmconv.convert.tokenizers import (
    BOS,
    EOM,
    EOS,
    EOT,
    NUM_SPECIAL,
    SentencePieceModel,
    is_tiktoken,
    parse_sentencepiece,
    parse_tiktoken,
    read_tokenizer,
    tiktoken_json,
    tiktoken_of,
    tokenizer_bytes,
    tokenizer_json,
)
from llmconv.convert.tokenizers import reserved_tokens as special_tokens
from llmconv.errors import listing
from llmconv.files.torch_writer import torch_pieces
from llmconv.output.plan import Plan, Shard, json_bytes
from llmconv.tensors import LazyTensor

TOKENIZER = "tokenizer.model"
RELEASED_SENTENCEPIECE = (32000, 32016)  # vocabulary of Llama 1 and 2, and of Code Llama
RELEASED_TIKTOKEN = 128256  # vocabulary of Llama 3


@dataclass(frozen=True)
class MetaTokenizer:
    """Tokenizer files, and ids for configs, or None; `stops` end a generation; `size` is the number of tokens, or 0."""

    files: Mapping[str, bytes] = field(default_factory=dict)
    bos: int | None = None
    eos: int | None = None
    stops: tuple[int, ...] = ()
    size: int = 0
    warnings: tuple[str, ...] = ()


def find_tokenizer(folder: Path) -> Path | None:
    """`tokenizer.model` next to the shards, or one folder up, where Meta's downloads put it."""
    return next(
        (place for place in (folder / TOKENIZER, folder.absolute().parent / TOKENIZER) if place.is_file()), None
    )


def without_tokenizer(vocabulary: int) -> MetaTokenizer:
    """The ids of the released model with this vocabulary size, for checkpoints without a tokenizer."""
    if vocabulary in RELEASED_SENTENCEPIECE:
        return MetaTokenizer(bos=1, eos=2, stops=(2,))
    if vocabulary == RELEASED_TIKTOKEN:
        base = vocabulary - NUM_SPECIAL
        return MetaTokenizer(bos=base + BOS, eos=base + EOS, stops=(base + EOS, base + EOT))
    return MetaTokenizer()


def tokenizer_for(
    path: Path | None, vocabulary: int, source: str, *, since_3_1: bool
) -> tuple[MetaTokenizer, list[str]]:
    """The tokenizer at `path` with its warnings; without one, the ids of the released model of this vocabulary size."""
    if path is None:
        return without_tokenizer(vocabulary), [
            f"`{source}` has no tokenizer; give one with `--tokenizer` if you need it"
        ]
    loaded = load_tokenizer(path, since_3_1=since_3_1)
    warnings = list(loaded.warnings)
    if loaded.size > vocabulary:
        warnings.append(
            f"the tokenizer has {loaded.size} tokens, the embedding {vocabulary}: does it belong to the model?"
        )
    return loaded, warnings


def load_tokenizer(path: Path, *, since_3_1: bool) -> MetaTokenizer:
    """Converts a `tokenizer.model`, or a folder with tokenizer files; one with a `tokenizer.json` is used unchanged.

    With `since_3_1` special tokens are those of Llama 3.1 and later (tiktoken only). Raises InputRefused if there is no
    tokenizer, or it is neither sentencepiece nor tiktoken.
    """
    files = read_tokenizer(path)
    if "tokenizer.json" in files or TOKENIZER not in files:
        return MetaTokenizer(files)
    if is_tiktoken(files[TOKENIZER]):
        return _from_tiktoken(parse_tiktoken(files[TOKENIZER]), since_3_1=since_3_1)
    return _from_sentencepiece(files[TOKENIZER], parse_sentencepiece(files[TOKENIZER]))


def _from_sentencepiece(data: bytes, model: SentencePieceModel) -> MetaTokenizer:
    names = {"bos_token": model.bos, "eos_token": model.eos, "unk_token": model.unk}
    settings = _settings({name: model.pieces[index][0] for name, index in names.items() if index >= 0})
    files = {TOKENIZER: data, "tokenizer_config.json": json_bytes(settings)}
    warnings: tuple[str, ...] = ()
    if model.is_bpe and min(names.values()) >= 0:
        files["tokenizer.json"] = tokenizer_bytes(tokenizer_json(model))
    else:
        warnings = ("the sentencepiece model is not a BPE with bos, eos and unk; only `tokenizer.model` is written",)
    return MetaTokenizer(files, model.bos, model.eos, (model.eos,), len(model.pieces), warnings)


def _from_tiktoken(ranks: dict[bytes, int], *, since_3_1: bool) -> MetaTokenizer:
    names, base = special_tokens(since_3_1=since_3_1), len(ranks)
    settings = _settings({"bos_token": names[BOS], "eos_token": names[EOS]})
    files = {
        "tokenizer.json": tokenizer_bytes(tiktoken_json(ranks, since_3_1=since_3_1)),
        "tokenizer_config.json": json_bytes(settings),
    }
    # the files do not distinguish a chat model from a base model, which never emits the other two
    stops = (EOS, EOM, EOT) if since_3_1 else (EOS, EOT)
    return MetaTokenizer(files, base + BOS, base + EOS, tuple(base + stop for stop in stops), base + len(names))


def _settings(tokens: dict[str, str]) -> dict[str, Any]:
    """`tokenizer_config.json` with the generic class: LlamaTokenizer of transformers 5 ignores `tokenizer.json`."""
    return {
        **tokens,
        "add_bos_token": True,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def save(checkpoint: Checkpoint, shards: int) -> Plan:
    """The files of a Meta checkpoint; see `Format.save`."""
    decoder = read_decoder(checkpoint)
    params = params_of(decoder, shards)
    tokenizer = _tokenizer(checkpoint, decoder)
    embedding_by_rows = is_tiktoken(tokenizer) if tokenizer else decoder.theta == 5e5
    # every rank has whole heads; with more ranks than key/value heads, neighboring ranks hold copies of one
    sizes = {
        "hidden_size": decoder.hidden,
        "intermediate_size": decoder.intermediate,
        "num_attention_heads": decoder.heads,
        "vocab_size": decoder.vocabulary,
    }
    refuse_shards(decoder.source, shards, sizes, {"num_key_value_heads": decoder.kv_heads})
    ranks: list[dict[str, LazyTensor]] = [{} for _ in range(shards)]
    # A Llama in Meta's names and row order, with a tied head; MalformedInput for wrong keys or shapes
    tensors = with_head(checkpoint, "model.embed_tokens.weight", tied=False)
    renamed = rename(tensors, inverted(LLAMA), decoder.source)
    order, rotated = inverse_order(rope_order(decoder.head_dim)), (".wq.weight", ".wk.weight")
    for name, tensor in {
        name: permute_rows(tensors[target], order) if name.endswith(rotated) else tensors[target]
        for name, target in renamed.items()
    }.items():
        for rank, part in zip(
            ranks, _parts(name, tensor, decoder, shards, embedding_by_rows=embedding_by_rows), strict=True
        ):
            rank[name] = part
    files = tuple(Shard(f"consolidated.{number:02}.pth", rank, torch_pieces) for number, rank in enumerate(ranks))
    small = ({TOKENIZER: tokenizer} if tokenizer else {}) | {"params.json": json_bytes(params)}
    # warnings about content that Meta's folder cannot hold
    losses = []
    if tokenizer is None:
        losses.append(f"`{decoder.source}` has no `{TOKENIZER}`, the only tokenizer that Meta's code reads")
    read_back = config_of(params, decoder)["max_position_embeddings"]
    if read_back != decoder.max_positions:
        losses.append(f"`params.json` does not contain `max_position_embeddings`; `to-hf` will assume {read_back}")
    return Plan(checkpoint, files, small, tuple(losses))


def _parts(
    name: str, tensor: LazyTensor, decoder: LlamaLikeConfig, shards: int, *, embedding_by_rows: bool
) -> Sequence[LazyTensor]:
    if (dim := split_dim(name)) is None:
        return [tensor] * shards
    if name.startswith("tok_") and embedding_by_rows:
        dim = 0
    if name.endswith((".wk.weight", ".wv.weight")) and shards > decoder.kv_heads:
        copies, size = shards // decoder.kv_heads, decoder.head_dim
        return [slice_rows(tensor, rank // copies * size, (rank // copies + 1) * size) for rank in range(shards)]
    return split(tensor, dim, shards)


def _tokenizer(checkpoint: Checkpoint, decoder: LlamaLikeConfig) -> bytes | None:
    """`tokenizer.model`, unchanged if there is one; Llama 3's can be made from `tokenizer.json`."""
    files = checkpoint.side_files
    if TOKENIZER in files or "tokenizer.json" not in files:
        return files.get(TOKENIZER)
    content = json_object(files["tokenizer.json"])
    made = tiktoken_of(content) if content else None
    return made if made and made.count(b"\n") + NUM_SPECIAL == decoder.vocabulary else None


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
    extra = plain_fields({name: value for name, value in config.items() if name not in PARAMS}, warnings)
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
