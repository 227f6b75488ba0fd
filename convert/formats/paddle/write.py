"""Writes PaddleNLP's folder: `model_state.pdparams`, or one file per rank, and `config.json`."""

from __future__ import annotations

from typing import Any

from llmconv.checkpoint import Checkpoint
from llmconv.convert.formats.paddle.generation import FILE, paddle_generation_config
from llmconv.convert.formats.paddle.names import FAMILIES
from llmconv.convert.formats.paddle.pdparams_writer import pdparams_pieces
from llmconv.convert.formats.paddle.read import WHOLE
from llmconv.convert.formats.paddle.split_ranks import split_among_ranks
from llmconv.convert.formats.paddle.tokenizer import MODEL, SENTENCEPIECE
from llmconv.convert.formats.paddle.write_config import config_of
from llmconv.convert.models.model_config import tied
from llmconv.convert.models.unsupported_settings import refuse_shards
from llmconv.errors import UnsupportedInput
from llmconv.output.plan import Plan, Shard, json_bytes

HEAD = "lm_head.weight"


def save(checkpoint: Checkpoint, shards: int) -> Plan:
    """The files of a PaddleNLP checkpoint; `open` of the format returns the same tensors, bit for bit.

    Raises:
        UnsupportedInput: PaddleNLP cannot express the model, or cannot divide it among ranks.
        MalformedInput: config and tensors contradict each other.
        UsageProblem: the model cannot be divided among this number of ranks.
    """
    checkpoint = tied(checkpoint)
    config, settings = config_of(checkpoint)
    family, source = FAMILIES[config["model_type"]], checkpoint.path.name
    _refuse_shards(config, settings, shards, source)
    tensors = dict(checkpoint.tensors)
    if config["model_type"] == "gpt":  # PaddleNLP's GPT always saves its head, which equals the embedding
        tensors[HEAD] = tensors.get(HEAD, tensors[family.embedding])
    # Llama-like models have Hugging Face's names after the prefix; an untied head is a Linear
    shapes = {name.replace("model.", family.prefix, 1): tensor.shape for name, tensor in tensors.items()}
    if HEAD in tensors and not settings["tie_word_embeddings"]:
        shapes[HEAD] = tensors[HEAD].shape[::-1]
    ranks = split_among_ranks(family.rules(settings, shapes), tensors, settings[family.layers], shards, source)
    names = [WHOLE] if shards == 1 else [f"model_state.tp{rank:02}.pdparams" for rank in range(shards)]
    files = tuple(Shard(name, rank, pdparams_pieces) for name, rank in zip(names, ranks, strict=True))
    parallel = {"tensor_parallel_degree": shards} if shards > 1 else {}
    small = {**_side_files(checkpoint), "config.json": json_bytes({**config, **parallel})}
    return Plan(checkpoint, files, small, _ignored(config))


def _ignored(config: dict[str, Any]) -> tuple[str, ...]:
    """A warning about a window that PaddleNLP ignores, if prompts can be longer than it."""
    window = config.get("sliding_window")
    if type(window) is not int or window >= config["max_position_embeddings"]:
        return ()
    return (f"PaddleNLP ignores `sliding_window` {window}: its results differ for longer inputs",)


def _refuse_shards(config: dict[str, Any], settings: dict[str, Any], shards: int, source: str) -> None:
    """Ranks need whole heads, equal parts of the feed-forward, and in some models equal parts of the vocabulary."""
    family = FAMILIES[config["model_type"]]
    if shards > 1 and not family.tensor_parallel:
        raise UnsupportedInput(
            f"`{source}` would be a {config['model_type']}, which cannot be split among ranks",
            hint="leave out `--shards`",
        )
    absolute = ("n_head", "n_embd", "n_inner", "hidden_size", "vocab_size")
    names = absolute if "n_head" in settings else ("num_attention_heads", "intermediate_size")
    refuse_shards(source, shards, {name: settings[name] for name in names if name in settings})


def _side_files(checkpoint: Checkpoint) -> dict[str, bytes]:
    """The side files; a sentencepiece model also under PaddleNLP's name."""
    files = dict(checkpoint.side_files)
    if FILE in files:
        files[FILE] = paddle_generation_config(files[FILE])
    return files | ({SENTENCEPIECE[0]: files[MODEL]} if MODEL in files else {})
