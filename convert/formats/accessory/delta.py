"""LLaMA2-Accessory's deltas: a folder of `consolidated.NN-of-MM.model-diff.pth`, over a base of any format.

Accessory `tools/weight_operate.py`: `{"model": {"llma.…": tuned − base}}` per model-parallel rank, in float16; what the
base does not have (LoRA, biases) is stored whole, what the delta does not have stays. Here base and delta are joined
first, so that they may be split differently, and the sum is made in float32 and rounded once; upstream's is float16.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from llmconv.checkpoint import Checkpoint
from llmconv.convert.deltas import DeltaFormat
from llmconv.convert.deltas.additive import added, all_rounded, wider
from llmconv.convert.formats.accessory.convert_tensors import to_hugging_face
from llmconv.convert.formats.accessory.names import ATTENTION, MLP, has_biases
from llmconv.convert.formats.accessory.plugins import leave_out
from llmconv.convert.formats.accessory.read import DELTA_FILE, join, open_shards
from llmconv.convert.formats.accessory.write import whole_tensors
from llmconv.convert.formats.accessory.write_config import args_of
from llmconv.convert.formats.accessory.write_delta import save_delta
from llmconv.convert.models.dtype import with_dtype
from llmconv.convert.models.tied_head import settle_head
from llmconv.errors import MalformedInput, listing
from llmconv.tensors import DType, LazyTensor


def is_accessory_delta(path: Path) -> bool:
    """Whether `path` is a folder with shards of a delta."""
    return path.is_dir() and any(DELTA_FILE.fullmatch(entry.name) for entry in path.iterdir())


def plus_accessory(base: Checkpoint, folder: Path, dtype: str) -> Checkpoint:
    """The tuned model in Hugging Face names, with the base's configuration, tokenizer and side files.

    Args:
        base: the model that training started from.
        folder: the shards of the delta.
        dtype: as in `llmconv.convert.deltas.additive.all_rounded`.

    Raises:
        UnsupportedInput: Accessory does not have such a base, or transformers lacks parts of the delta.
        MalformedInput: a shard is missing, or the delta contradicts the base.
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
    """All tensors in Accessory's names; those of the delta are added in float32."""
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


DELTA = DeltaFormat(detect=is_accessory_delta, apply=plus_accessory, save=save_delta)
