"""Writes LLaMA2-Accessory's deltas, as `tools/weight_operate.py --operate_type extract` does.

Per model-parallel rank `{"model": {"llma.…": tuned - base}}`, subtracted in float32 and stored in float16; what the
base lacks is stored whole. The tool pairs the files with those of the base: in Meta's layout, and as many.
"""

from __future__ import annotations

from functools import partial

from llmconv.checkpoint import Checkpoint
from llmconv.convert.deltas import WrittenDelta
from llmconv.convert.deltas.subtraction import FLOAT16, FLOAT32, Arithmetic, Differences
from llmconv.convert.formats.accessory.write import small_files, split_ranks
from llmconv.convert.formats.accessory.write_config import AccessoryArgs, args_of
from llmconv.errors import UnsupportedInput, listing
from llmconv.files.torch.writer import torch_pieces
from llmconv.output.plan import Plan, Shard
from llmconv.tensors import LazyTensor

SPLIT = ("meta", "accessory")
"""Formats whose files are model-parallel ranks."""

RUN_FIELDS = {"max_batch_size", "max_seq_len", "lora_rank", "bias_tuning", "norm_tuning"}
"""Fields of `config.json` that a tuned model may change: they do not change what the shared weights mean."""

WITHOUT = "extract an exact delta, without `--to`"


def save_delta(base: Checkpoint, tuned: Checkpoint, shards: int | None) -> WrittenDelta:
    """The files of a delta, and those of the tuned model that Accessory's loader looks for next to weights.

    Args:
        base, tuned: the models before and after tuning.
        shards: number of ranks; None: as many as the base has, one if it is not split.

    Raises:
        UnsupportedInput: Accessory has no such model, or its deltas cannot contain the change.
        UsageProblem: the model cannot be divided among this number of ranks.
    """
    count = shards or (base.shards if base.format in SPLIT else 1)
    before, after = args_of(base), args_of(tuned)
    _require_same_settings(before, after)
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


def _require_same_settings(before: AccessoryArgs, after: AccessoryArgs) -> None:
    """Refuses other settings, since a delta is applied with the base's."""
    names = sorted({*before.params.fields, *after.params.fields} - RUN_FIELDS)
    one, other = before.params.fields, after.params.fields
    odd = [name for name in names if one.get(name) != other.get(name)]
    if odd or before.params.family != after.params.family:
        raise UnsupportedInput(
            f"the two models differ in {listing(odd or ['llama_type'])}, which Accessory's deltas do not contain",
            hint=WITHOUT,
        )


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
