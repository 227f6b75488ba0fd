"""A Llama in Hugging Face names as Meta's folder: `consolidated.NN.pth`, `params.json`, `tokenizer.model`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from llmconv.checkpoint import Checkpoint
from llmconv.convert.algebra.operations import (
    inverse_order,
    inverted,
    listing,
    permute_rows,
    rename,
    require,
    rope_order,
    slice_rows,
    split,
)
from llmconv.convert.formats.meta.names import LLAMA, split_dim
from llmconv.convert.formats.meta.tokenizer import TOKENIZER
from llmconv.convert.formats.meta.write_config import config_of, params_of
from llmconv.convert.models.llama_like import Decoder, read_decoder, refuse_shards, with_head
from llmconv.convert.tokenizers.tiktoken_json import NUM_SPECIAL, is_tiktoken, tiktoken_of
from llmconv.errors import MalformedInput
from llmconv.files.torch.writer import torch_pieces
from llmconv.output.plan import Plan, Shard, json_bytes
from llmconv.tensors import LazyTensor


def save(checkpoint: Checkpoint, shards: int) -> Plan:
    """The files of a Meta checkpoint; `open` of the format returns the same tensors, bit for bit.

    Raises:
        UnsupportedInput: Meta's code cannot hold the model.
        MalformedInput: config and tensors contradict each other.
        UsageProblem: the model does not divide among this number of shards.
    """
    decoder = read_decoder(checkpoint)
    params = params_of(decoder, shards)
    tokenizer = _tokenizer(checkpoint, decoder)
    by_words = is_tiktoken(tokenizer) if tokenizer else decoder.theta == 5e5
    _refuse_shards(decoder, shards)
    ranks: list[dict[str, LazyTensor]] = [{} for _ in range(shards)]
    for name, tensor in llama_tensors(checkpoint, decoder).items():
        for rank, part in zip(ranks, _parts(name, tensor, decoder, shards, by_words=by_words), strict=True):
            rank[name] = part
    files = tuple(Shard(f"consolidated.{number:02}.pth", rank, torch_pieces) for number, rank in enumerate(ranks))
    small = ({TOKENIZER: tokenizer} if tokenizer else {}) | {"params.json": json_bytes(params)}
    return Plan(checkpoint, files, small, _losses(decoder, params, tokenizer))


def llama_tensors(checkpoint: Checkpoint, decoder: Decoder) -> dict[str, LazyTensor]:
    """The whole tensors of a llama under Meta's names and in its order of rows; a tied head is written out.

    Raises:
        MalformedInput: a tensor is missing, left over, or of another shape than the config declares.
    """
    tensors = with_head(checkpoint, "model.embed_tokens.weight", tied=False)
    shapes = decoder.shapes()
    require(shapes, tensors, decoder.source)
    renamed = rename(tensors, inverted(LLAMA), decoder.source)
    check_shapes(tensors, shapes, decoder.source)
    order, turned = inverse_order(rope_order(decoder.head_dim)), (".wq.weight", ".wk.weight")
    return {
        name: permute_rows(tensors[target], order) if name.endswith(turned) else tensors[target]
        for name, target in renamed.items()
    }


def check_shapes(tensors: Mapping[str, LazyTensor], shapes: Mapping[str, tuple[int, ...]], source: str) -> None:
    """Every tensor has the shape that the config gives it.

    Raises:
        MalformedInput: lists those that have not.
    """
    odd = [f"{name} {list(tensors[name].shape)}" for name, shape in shapes.items() if tensors[name].shape != shape]
    if odd:
        raise MalformedInput(
            f"`{source}` has {len(odd)} tensors of another shape than its `config.json` declares: {listing(odd)}",
            hint="the config belongs to another model; copy the folder again",
        )


def _refuse_shards(decoder: Decoder, shards: int) -> None:
    """Every rank has whole heads; with more ranks than key/value heads, neighbours hold the same one."""
    sizes = {
        "hidden_size": decoder.hidden,
        "intermediate_size": decoder.intermediate,
        "num_attention_heads": decoder.heads,
        "vocab_size": decoder.vocabulary,
    }
    refuse_shards(decoder.source, shards, sizes, {"num_key_value_heads": decoder.kv_heads})


def _parts(name: str, tensor: LazyTensor, decoder: Decoder, shards: int, *, by_words: bool) -> Sequence[LazyTensor]:
    """What each rank holds of a tensor."""
    dim = split_dim(name)
    if dim is None:
        return [tensor] * shards
    if name.startswith("tok_") and by_words:
        dim = 0
    if name.endswith((".wk.weight", ".wv.weight")) and shards > decoder.kv_heads:
        copies, size = shards // decoder.kv_heads, decoder.head_dim
        return [slice_rows(tensor, rank // copies * size, (rank // copies + 1) * size) for rank in range(shards)]
    return split(tensor, dim, shards)


def _tokenizer(checkpoint: Checkpoint, decoder: Decoder) -> bytes | None:
    """`tokenizer.model`: byte for byte where there is one; Llama 3's can be made from `tokenizer.json`."""
    files = checkpoint.side_files
    if TOKENIZER in files or "tokenizer.json" not in files:
        return files.get(TOKENIZER)
    try:
        content = json.loads(files["tokenizer.json"])
    except (ValueError, RecursionError):
        return None
    made = tiktoken_of(content) if isinstance(content, dict) else None
    return made if made and made.count(b"\n") + NUM_SPECIAL == decoder.vocabulary else None


def _losses(decoder: Decoder, params: Mapping[str, Any], tokenizer: bytes | None) -> tuple[str, ...]:
    """What Meta's folder has no place for."""
    losses = []
    if tokenizer is None:
        losses.append(f"`{decoder.source}` has no `{TOKENIZER}`, the only tokenizer that Meta's code reads")
    told = config_of(params, decoder)["max_position_embeddings"]
    if told != decoder.max_positions:
        losses.append(f"`params.json` does not hold `max_position_embeddings`; `to-hf` will take {told} for it")
    return tuple(losses)
