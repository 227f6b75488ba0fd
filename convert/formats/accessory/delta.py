"""Reads and writes LLaMA2-Accessory's deltas: a folder of `consolidated.NN-of-MM.model-diff.pth`.

Accessory `tools/weight_operate.py`: `{"model": {"llma.…": tuned − base}}` per model-parallel rank, subtracted in
float32 and stored in float16; what the base does not have (LoRA, biases) is stored whole, what the delta does not have
stays. Reading joins base (of any format) and delta first, so that they may be split differently, and adds in float32
with one rounding; upstream's sum is float16. Written files pair with those of the base: in Meta's layout, and as many.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from llmconv.checkpoint import Checkpoint
from llmconv.convert.deltas import DeltaFormat
from llmconv.convert.deltas.arithmetic import (
    FLOAT16,
    FLOAT32,
    Arithmetic,
    Differences,
    WrittenDelta,
    added,
    all_rounded,
    wider,
)
from llmconv.convert.formats.accessory.config import ATTENTION, MLP, args_of, has_biases
from llmconv.convert.formats.accessory.read import (
    DELTA_FILE,
    join,
    leave_out,
    open_shards,
    small_files,
    split_ranks,
    to_hugging_face,
    whole_tensors,
)
from llmconv.convert.models.head_and_dtype import settle_head, with_dtype
from llmconv.errors import MalformedInput, UnsupportedInput, listing
from llmconv.files.torch_writer import torch_pieces
from llmconv.output.plan import Plan, Shard
from llmconv.tensors import DType, LazyTensor

SPLIT = ("meta", "accessory")  # formats whose files are model-parallel ranks
RUN_FIELDS = {"max_batch_size", "max_seq_len", "lora_rank", "bias_tuning", "norm_tuning"}
"""Fields of `config.json` that a tuned model may change: they do not change what the shared weights mean."""

WITHOUT = "extract an exact delta, without `--to`"


def save_delta(base: Checkpoint, tuned: Checkpoint, shards: int | None) -> WrittenDelta:
    """The files of a delta in `shards` ranks (None: as the base), and those that Accessory's loader looks for.

    Raises UnsupportedInput for a model or change that it cannot have, UsageProblem for a number that does not divide
    it.
    """
    count = shards or (base.shards if base.format in SPLIT else 1)
    before, after = args_of(base), args_of(tuned)
    # refuses other settings, since a delta is applied with the base's
    names = sorted({*before.params.fields, *after.params.fields} - RUN_FIELDS)
    one, other = before.params.fields, after.params.fields
    odd = [name for name in names if one.get(name) != other.get(name)]
    if odd or before.params.family != after.params.family:
        raise UnsupportedInput(
            f"the two models differ in {listing(odd or ['llama_type'])}, which Accessory's deltas do not contain",
            hint=WITHOUT,
        )
    below, above = split_ranks(base, before, count), split_ranks(tuned, after, count)
    _require_same_shapes(below[0], above[0])
    differences = Differences(Arithmetic(FLOAT32, FLOAT16))
    container = partial(torch_pieces, inside=("model",))
    files = tuple(
        Shard(
            f"consolidated.{number:02}-of-{count:02}.model-diff.pth",
            {name: differences.of(name, below[number].get(name), tensor) for name, tensor in rank.items()},
            container,
        )
        for number, rank in enumerate(above)
    )
    small, warnings = small_files(tuned, after)
    return WrittenDelta(Plan(tuned, files, small, (*warnings, *_lost_tokenizer(base, tuned))), differences)


def _require_same_shapes(below: dict[str, LazyTensor], above: dict[str, LazyTensor]) -> None:
    odd = sorted(below.keys() - above.keys())
    odd += [name for name in above if name in below and above[name].shape != below[name].shape]
    if odd:
        raise UnsupportedInput(
            f"the tuned model lacks, or has in another shape, {len(odd)} tensors of the base: {listing(odd)}",
            hint=WITHOUT,
        )


def _lost_tokenizer(base: Checkpoint, tuned: Checkpoint) -> list[str]:
    """A warning where the tokenizers differ, since the one of the base stays."""
    names = ("tokenizer.model", "tokenizer.json")
    if all(base.side_files.get(name) == tuned.side_files.get(name) for name in names):
        return []
    return ["the tokenizers differ, and a sum with Accessory's deltas keeps that of the base"]


def plus_accessory(base: Checkpoint, folder: Path, dtype: str) -> Checkpoint:
    """The tuned model in Hugging Face names and `dtype` (see `all_rounded`), with the base's config and side files.

    Raises UnsupportedInput for a base or parts that Accessory or transformers lacks, MalformedInput for another base,
    or a missing shard.
    """
    args = args_of(base)
    family, name = args.params.family, folder.absolute().name
    shards = open_shards(folder, DELTA_FILE)
    one_head = family == "falcon" and args.params.fields.get("multi_query", True)
    delta = join(shards, ("wk", "wv") if one_head else (), args.params.experts, name)
    base_tensors, kept = whole_tensors(base, args), _types(base, shards)
    leave_out(delta, family, name, drop=False)
    sums = to_hugging_face(_add(base_tensors, delta, name), args.params, name)
    tensors = all_rounded(sums, {target: kept.get(target, _common(kept)) for target in sums}, dtype)
    config = settle_head(tensors, {**base.config, "tie_word_embeddings": None}, [])
    if family == "llama":
        config |= {"attention_bias": has_biases(tensors, ATTENTION), "mlp_bias": has_biases(tensors, MLP)}
    return replace(base, tensors=tensors, config=with_dtype(config, tensors))


def _types(base: Checkpoint, shards: Sequence[dict[str, LazyTensor]]) -> dict[str, DType]:
    """Name to dtype of each tensor of the sum."""
    added_type = _common({name: tensor.dtype for name, tensor in shards[0].items()})
    return {name: wider(tensor.dtype, added_type) for name, tensor in base.items()}


def _common(types: Mapping[str, DType]) -> DType:
    return Counter(types.values()).most_common(1)[0][0]


def _add(base_tensors: dict[str, LazyTensor], delta: dict[str, LazyTensor], source: str) -> dict[str, LazyTensor]:
    wrong = [
        name for name, tensor in delta.items() if name in base_tensors and base_tensors[name].shape != tensor.shape
    ]
    if wrong:
        shapes = [f"{name} {list(delta[name].shape)} for {list(base_tensors[name].shape)}" for name in wrong]
        raise MalformedInput(
            f"shape mismatch between `{source}` and the base for {len(wrong)} tensors: {listing(shapes)}",
            hint="give the model that the training started from",
        )
    sums = {
        name: added(name, base_tensors.get(name), tensor)
        for name, tensor in delta.items()
        if not name.endswith("rope.freqs")
    }
    return {**base_tensors, **sums}


DELTA = DeltaFormat(
    detect=lambda path: path.is_dir() and any(DELTA_FILE.fullmatch(entry.name) for entry in path.iterdir()),
    apply=plus_accessory,
    save=save_delta,
)
