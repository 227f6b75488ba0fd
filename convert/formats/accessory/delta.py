"""LLaMA2-Accessory's deltas: differences between a tuned model and its base.

Deltas (`tools/weight_operate.py`), `consolidated.NN-of-MM.model-diff.pth`: tuned − base, subtracted in float32 and
stored in float16; what the base does not have (LoRA, biases) is stored whole, what the delta does not have stays.
Reading joins base (of any format) and delta first, so that they may be split differently, and adds in float32 with one
rounding; upstream's sum is float16. Written files pair with those of the base: in Meta's layout, and as many.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from llmconv.checkpoint import Checkpoint
from llmconv.convert.deltas import arithmetic
from llmconv.convert.formats import DeltaFormat
from llmconv.convert.formats.accessory import config as configs
from llmconv.convert.formats.accessory import read
from llmconv.convert.models.head_and_dtype import settle_head, with_dtype
from llmconv.errors import MalformedInput, UnsupportedInput, listing
from llmconv.files.torch_writer import torch_pieces
from llmconv.output.plan import Plan, Shard
from llmconv.tensors import DType, LazyTensor

SPLIT = ("meta", "accessory")  # formats whose files are model-parallel ranks
# Fields of `config.json` that a tuned model may change: they do not change what the shared weights mean
RUN_FIELDS = {"max_batch_size", "max_seq_len", "lora_rank", "bias_tuning", "norm_tuning"}
WITHOUT = "extract an exact delta, without `--to`"


def save_delta(base: Checkpoint, tuned: Checkpoint, shards: int | None) -> arithmetic.WrittenDelta:
    """The files of a delta in `shards` ranks (None: as the base), and those that Accessory's loader looks for.

    Raises UnsupportedInput for a model or change that it cannot have, UsageProblem for a number that does not divide
    it.
    """
    count = shards or (base.shards if base.format in SPLIT else 1)
    before, after = configs.args_of(base), configs.args_of(tuned)
    # refuses other settings, since a delta is applied with the base's
    names = sorted({*before.params.fields, *after.params.fields} - RUN_FIELDS)
    one, other = before.params.fields, after.params.fields
    odd = [name for name in names if one.get(name) != other.get(name)]
    if odd or before.params.family != after.params.family:
        raise UnsupportedInput(
            f"the two models differ in {listing(odd or ['llama_type'])}, which Accessory's deltas do not contain",
            hint=WITHOUT,
        )
    below, above = read.split_ranks(base, before, count), read.split_ranks(tuned, after, count)
    resized = [name for name, tensor in above[0].items() if name in below[0] and tensor.shape != below[0][name].shape]
    if changed := [*sorted(below[0].keys() - above[0].keys()), *resized]:
        raise UnsupportedInput(
            f"the tuned model lacks, or has in another shape, {len(changed)} tensors of the base: {listing(changed)}",
            hint=WITHOUT,
        )
    differences = arithmetic.Differences(arithmetic.FLOAT32, arithmetic.FLOAT16)
    container = partial(torch_pieces, inside=("model",))
    files = tuple(
        Shard(
            f"consolidated.{number:02}-of-{count:02}.model-diff.pth",
            {name: differences.of(name, below[number].get(name), tensor) for name, tensor in rank.items()},
            container,
        )
        for number, rank in enumerate(above)
    )
    small, warnings = read.small_files(tuned, after)
    tokenizers = ("tokenizer.model", "tokenizer.json")
    if any(base.side_files.get(name) != tuned.side_files.get(name) for name in tokenizers):
        warnings += ("the tokenizers differ, and a sum with Accessory's deltas keeps that of the base",)
    return arithmetic.WrittenDelta(Plan(tuned, files, small, warnings), differences)


def plus_accessory(base: Checkpoint, folder: Path, dtype: str) -> Checkpoint:
    """The tuned model in Hugging Face names and `dtype` (see `types_of`), with the base's config and side files.

    Raises UnsupportedInput for a base or parts that Accessory or transformers lacks, MalformedInput for another base,
    or a missing shard.
    """
    args = configs.args_of(base)
    family, name = args.params.family, folder.absolute().name
    shards = read.open_shards(folder, read.DELTA_FILE)
    delta = read.join(shards, args.params.copied, args.params.experts, name)
    base_tensors = read.whole_tensors(base, args)
    added_type = _common({name: tensor.dtype for name, tensor in shards[0].items()})
    kept = {name: arithmetic.wider(tensor.dtype, added_type) for name, tensor in base.items()}
    read.leave_out(delta, family, name, drop=False)
    sums = read.to_hugging_face(_add(base_tensors, delta, name), args.params, name)
    own = {target: kept.get(target, _common(kept)) for target in sums}
    types = arithmetic.types_of(sums, base.config, own, dtype)
    tensors = {target: arithmetic.rounded(one, types[target]) for target, one in sums.items()}
    config = settle_head(tensors, {**base.config, "tie_word_embeddings": None}, [])
    if family == "llama":
        config |= {switch: configs.has_biases(tensors, layers) for switch, layers in configs.SWITCHES.items()}
    return replace(base, tensors=tensors, config=with_dtype(config, tensors))


def _common(types: Mapping[str, DType]) -> DType:
    return Counter(types.values()).most_common(1)[0][0]


def _add(base_tensors: dict[str, LazyTensor], delta: dict[str, LazyTensor], source: str) -> dict[str, LazyTensor]:
    if wrong := [name for name, own in delta.items() if name in base_tensors and base_tensors[name].shape != own.shape]:
        shapes = [f"{name} {list(delta[name].shape)} for {list(base_tensors[name].shape)}" for name in wrong]
        raise MalformedInput(
            f"shape mismatch between `{source}` and the base for {len(wrong)} tensors: {listing(shapes)}",
            hint="give the model that the training started from",
        )
    sums = {
        name: arithmetic.added(name, base_tensors.get(name), tensor)
        for name, tensor in delta.items()
        if not name.endswith("rope.freqs")
    }
    return {**base_tensors, **sums}


DELTA = DeltaFormat(
    detect=lambda path: path.is_dir() and any(read.DELTA_FILE.fullmatch(entry.name) for entry in path.iterdir()),
    apply=plus_accessory,
    save=save_delta,
)
