"""Deltas as the scripts of FastChat and Stanford Alpaca make and apply them: Hugging Face folders of tuned - base.

FastChat `model/make_delta.py` and `apply_delta.py`: both models are loaded in float16; with `--low-cpu-mem` only files
called `pytorch_model-*.bin` are read. Stanford Alpaca `weight_diff.py`: both in float32; a base whose tokenizer has no
padding token first gets `[PAD]`, whose rows are the mean of the others. Both go through the state dict, where a tied
output head occurs twice.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from llmconv.checkpoint import Checkpoint
from llmconv.convert.deltas import WrittenDelta
from llmconv.convert.deltas.arithmetic import (
    FLOAT16,
    FLOAT32,
    VOCABULARIES,
    Arithmetic,
    Differences,
    begins_at_mean,
    is_vocabulary,
    with_mean_rows,
)
from llmconv.convert.deltas.low_rank import TRACES
from llmconv.convert.models.completeness import DROPPED
from llmconv.convert.models.config_file import without_code
from llmconv.convert.models.dtype import with_dtype
from llmconv.convert.models.tied_head import find_embedding, find_head, is_tied
from llmconv.errors import UnsupportedInput, listing
from llmconv.files.torch_writer import torch_pieces
from llmconv.output.plan import Plan, Shard, by_size, json_bytes, parse_size
from llmconv.tensors import LazyTensor

WITHOUT = "extract an exact delta, without `--to`"
NamedTensors = Mapping[str, LazyTensor]


@dataclass(frozen=True)
class Script:
    """How one of the two scripts computes."""

    title: str
    arithmetic: Arithmetic
    mean_rows: bool  # a new token of the base is the mean of the others, else zeros
    own_config: bool  # the tuned model gets the config of the delta, else of the base


SCRIPTS = {
    "fastchat": Script("FastChat", Arithmetic(FLOAT16, FLOAT16), mean_rows=False, own_config=False),
    "alpaca": Script("Stanford Alpaca", Arithmetic(FLOAT32, FLOAT32), mean_rows=True, own_config=True),
}


def plan_script_delta(base: Checkpoint, tuned: Checkpoint, to: str, max_shard_size: str | int) -> WrittenDelta:
    """The files of a delta for `fastchat` or `alpaca` (`to`); UnsupportedInput if it cannot restore the tuned model."""
    script = SCRIPTS[to]
    below, above = (_weights(side, script) for side in (base, tuned))
    if odd := sorted(below.keys() ^ above.keys()):
        raise UnsupportedInput(f"only one of the two models has {listing(odd)}", hint=WITHOUT)
    grown = _grown(below, above, script)
    differences = Differences(script.arithmetic)
    if script.mean_rows:
        below = {n: with_mean_rows(t, above[n].num_rows) if n in grown else t for n, t in below.items()}
    tensors = {name: differences.of(name, below[name], above[name]) for name in above}
    if script.mean_rows:
        _require_recognized(base, tensors, above)
    config, code = without_code(tuned.config)
    delta = replace(tuned, tensors=tensors, config=with_dtype(config, tensors))
    warnings = [f"dropped {listing(code)} from the configuration: a delta contains no code"] if code else []
    warnings += _warnings(base, tuned, script, grown=bool(grown))
    return WrittenDelta(Plan(delta, *_files(delta, max_shard_size), tuple(warnings)), differences)


def _files(delta: Checkpoint, max_shard_size: str | int) -> tuple[tuple[Shard, ...], dict[str, bytes]]:
    """Torch files with an index, also where there is one file: FastChat's `--low-cpu-mem` reads no other names."""
    groups = by_size(delta.tensors, parse_size(max_shard_size))
    shards = tuple(
        Shard(f"pytorch_model-{number:05}-of-{len(groups):05}.bin", group, torch_pieces)
        for number, group in enumerate(groups, 1)
    )
    weight_map = {name: shard.name for shard in shards for name in shard.tensors}
    index = {"metadata": {"total_size": delta.nbytes}, "weight_map": weight_map}
    small = {"config.json": json_bytes(delta.config), "pytorch_model.bin.index.json": json_bytes(index)}
    return shards, {**delta.side_files, **small}


def _weights(side: Checkpoint, script: Script) -> NamedTensors:
    """The tensors without buffers; UnsupportedInput if they are quantized or the output head is tied."""
    name = side.path.absolute().name
    if side.config.get("quantization_config"):
        raise UnsupportedInput(f"`{name}` is quantized", hint="give the weights from before quantization")
    tensors = {name: tensor for name, tensor in side.items() if not DROPPED.search(name)}
    if is_tied(side.config) and find_head(tensors, find_embedding(tensors)) not in tensors:
        raise UnsupportedInput(
            f"the output head of `{name}` is tied to its embedding, to which {script.title}'s script adds twice",
            hint=WITHOUT,
        )
    return tensors


def _grown(below: NamedTensors, above: NamedTensors, script: Script) -> list[str]:
    """The names of the matrices with one token more; UnsupportedInput for any other difference in shape."""
    odd = [name for name in above if above[name].shape != below[name].shape]
    wrong = [name for name in odd if not is_vocabulary(name) or above[name].shape[1:] != below[name].shape[1:]]
    if wrong:
        shapes = [f"{name} {list(above[name].shape)} for {list(below[name].shape)}" for name in wrong]
        raise UnsupportedInput(f"shape mismatch for {len(wrong)} tensors: {listing(shapes)}", hint=WITHOUT)
    if more := sorted({above[name].num_rows - below[name].num_rows for name in odd} - {1}):
        change = f"{more[0]} more" if more[0] > 0 else f"{-more[0]} fewer"
        raise UnsupportedInput(
            f"the tuned model has {change} tokens, and {script.title}'s script adds one, `[PAD]`, or none", hint=WITHOUT
        )
    return odd


def _require_recognized(base: Checkpoint, delta: NamedTensors, above: NamedTensors) -> None:
    """Refuses a new token that `delta apply` would take for one that FastChat counts from zeros."""
    name = find_embedding(above)
    grown = name is not None and base[name].num_rows < above[name].num_rows
    if name and grown and not begins_at_mean(base[name], delta[name]):
        raise UnsupportedInput(
            f"the new row of `{name}` is not near the mean of the others, as an untrained `[PAD]` is", hint=WITHOUT
        )


def _warnings(base: Checkpoint, tuned: Checkpoint, script: Script, *, grown: bool) -> list[str]:
    warnings = []
    if not tuned.side_files.keys() & VOCABULARIES:
        warnings.append(f"the tuned model has no tokenizer, and {script.title}'s script loads that of the delta")
    names = sorted({*base.config, *tuned.config} - {*TRACES})
    odd = [name for name in names if base.config.get(name) != tuned.config.get(name)]
    if odd and not script.own_config:
        warnings.append(f"{script.title}'s script keeps the base's configuration; the models differ in {listing(odd)}")
    if grown and not script.mean_rows:
        warnings.append("only FastChat before 0.2 lengthens the base by one token; later ones cannot apply this delta")
    if script.mean_rows and base.side_files.keys() & VOCABULARIES and grown == _has_padding(base):
        expected = "no more tokens, since the base has a padding token" if grown else "one token more, `[PAD]`"
        warnings.append(f"{script.title}'s script expects {expected}; only `llmconv delta apply` can apply this delta")
    return warnings


def _has_padding(model: Checkpoint) -> bool:
    """Whether the tokenizer's files name a padding token."""
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        try:
            content: Any = json.loads(model.side_files.get(name, b"{}"))
        except (ValueError, RecursionError):
            continue
        if isinstance(content, dict) and content.get("pad_token"):
            return True
    return False
