"""Arithmetic deltas, Hugging Face folders of tuned − base: FastChat's (Vicuna), Stanford Alpaca's, and similar ones.

FastChat `model/apply_delta.py`: names are those of the base; `param += delta`, both in float16. Up to v0 it made the
base's embedding and head longer by a row of zeros first, because Vicuna v0 had 32,001 tokens. Tokenizer and (with
`--low-cpu-mem`) config are the delta's. Here the sum is made in float32 and rounded once; for a float16 delta and a
float16 result the base is rounded to float16 first, so that the bits equal FastChat's for a base of any type.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from llmconv.checkpoint import Checkpoint, open_weights, read_json, read_side_files
from llmconv.convert.deltas.alpaca import WeightSum, begins_at_mean, checksum_of, with_mean_rows
from llmconv.convert.deltas.subtraction import added, all_rounded, rounded, wider
from llmconv.convert.models.blueprint.names import EMBEDDINGS
from llmconv.convert.models.completeness import DROPPED
from llmconv.convert.models.config_file import without_code
from llmconv.convert.models.dtype import with_dtype
from llmconv.convert.models.tied_head import HEAD, find_embedding, is_tied, set_everywhere
from llmconv.convert.state_dicts.folders import is_bin_folder, open_bin_folder
from llmconv.errors import InputRefused, MalformedInput, UnsupportedInput, listing
from llmconv.model_code import AUTO_MAP
from llmconv.tensors import BY_NAME, DType, LazyTensor

NORM = ("norm.weight", "ln_f.weight")
"""Names of the last norm, whose weights are about 1 in a model and about 0 in a delta."""

GENERATION = "generation_config.json"
VOCABULARIES = {
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
}


def open_difference(folder: Path) -> Checkpoint:
    """A folder of tuned − base: its tensors under their own names, without buffers.

    Raises InputRefused without weights in safetensors or torch files, UnsupportedInput for quantized ones.
    """
    tensors = open_bin_folder(folder).tensors() if is_bin_folder(folder) else open_weights(folder)
    config = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    kept = {name: tensor for name, tensor in tensors.items() if not DROPPED.search(name)}
    return Checkpoint(folder, "delta", kept, config, read_side_files(folder))


def plus_difference(base: Checkpoint, delta: Checkpoint, dtype: str) -> tuple[Checkpoint, WeightSum | None]:
    """The tuned model, base + delta, in `dtype` (or `keep`), and its checksum if the delta has one.

    The delta's config and side files take precedence. Raises MalformedInput for missing or unexpected keys, or a shape
    mismatch, except for a vocabulary that grew, UnsupportedInput if one of them is quantized.
    """
    if base.config.get("quantization_config") or delta.config.get("quantization_config"):
        raise UnsupportedInput("base or delta is quantized", hint="give the weights from before quantization")
    below, above = _same_names(base, delta)
    _check_shapes(base, delta, below, above)
    by_mean = _begin_at_mean(below, above)
    _require_delta(below, above, delta)
    warnings = [*base.warnings, *_grown(below, above, by_mean=by_mean)]
    kept = {name: wider(below[name].dtype, above[name].dtype) for name in below}
    chosen = {name: BY_NAME.get(dtype, kept[name]) for name in below}
    if by_mean:
        below = {
            name: tensor if tensor.shape == above[name].shape else with_mean_rows(tensor, above[name].num_rows)
            for name, tensor in below.items()
        }
    sums = {name: added(name, _halved(below[name], above[name], chosen[name]), above[name]) for name in below}
    (own, _), (other, dropped) = without_code(base.config), without_code(delta.config)
    config = {**own, **other, **({AUTO_MAP: base.config[AUTO_MAP]} if AUTO_MAP in base.config else {})}
    warnings += [f"dropped {listing(dropped)} from the configuration: no code comes from a delta"] if dropped else []
    if embedding := find_embedding(below):
        set_everywhere(config, "vocab_size", above[embedding].num_rows)
    if HEAD in below and is_tied(config):
        set_everywhere(config, "tie_word_embeddings", False)
    checksum = checksum_of(delta.path, config, mean_rows=by_mean)
    tensors = all_rounded(checksum.watched(sums) if checksum else sums, kept, dtype)
    files = _files(base.side_files, delta.side_files)
    tuned = replace(
        base, tensors=tensors, config=with_dtype(config, tensors), side_files=files, warnings=tuple(warnings)
    )
    return tuned, checksum


def _files(base: Mapping[str, bytes], delta: Mapping[str, bytes]) -> dict[str, bytes]:
    """The delta's files, and the base's unless they are of a tokenizer that the delta has, too."""
    kept = {
        name: content
        for name, content in base.items()
        if name == GENERATION or name.endswith(".py") or not delta.keys() & VOCABULARIES
    }
    return {**kept, **delta}


NamedTensors = Mapping[str, LazyTensor]


def _same_names(base: Checkpoint, delta: Checkpoint) -> tuple[NamedTensors, NamedTensors]:
    """The tensors of both, without buffers, with a head that only one stores; MalformedInput for missing keys."""
    below = {name: tensor for name, tensor in base.items() if not DROPPED.search(name)}
    above = dict(delta.tensors)
    for one, other in ((below, above), (above, below)):
        config, embedding = base.config if one is below else delta.config or base.config, find_embedding(one)
        if HEAD in other and HEAD not in one and embedding and is_tied(config):
            one[HEAD] = one[embedding]
    for one, other, where in ((below, above, "delta"), (above, below, "base")):
        if missing := [name for name in one if name not in other]:
            raise MalformedInput(
                f"{len(missing)} missing keys in the {where}: {listing(missing)}",
                hint="the delta was made from another model; see its page for the base it needs",
            )
    return below, {name: above[name] for name in below}


def _check_shapes(base: Checkpoint, delta: Checkpoint, below: NamedTensors, above: NamedTensors) -> None:
    odd = [
        f"{name} {list(above[name].shape)} for {list(below[name].shape)}"
        for name in below
        if below[name].shape != above[name].shape
        and not (is_vocabulary(name) and _is_longer(below[name].shape, above[name].shape))
    ]
    if not odd:
        return
    hint = "the delta was made from another model; see its page for the base it needs"
    if all(is_vocabulary(entry.split(" ")[0]) for entry in odd):
        hint = "the base has tokens that the delta's base did not have; give it as it was published"
    raise MalformedInput(
        f"shape mismatch for {len(odd)} tensors of `{delta.path.absolute().name}` and "
        f"`{base.path.absolute().name}`: " + listing(odd),
        hint=hint,
    )


def is_vocabulary(name: str) -> bool:
    """Whether a tensor of this name has a row for each token."""
    return name == HEAD or name.endswith(EMBEDDINGS)


def _is_longer(below: tuple[int, ...], above: tuple[int, ...]) -> bool:
    return len(below) == len(above) and below[1:] == above[1:] and above[0] > below[0]


def _halved(base: LazyTensor, delta: LazyTensor, result: DType) -> LazyTensor:
    """The base, rounded to float16 if FastChat's script would do so before adding."""
    return rounded(base, result) if delta.dtype == result == BY_NAME["float16"] else base


def _begin_at_mean(below: NamedTensors, above: NamedTensors) -> bool:
    """Whether new tokens are stored as differences from the mean of the others, as Stanford Alpaca's are."""
    name = find_embedding(below)
    if name is None or below[name].num_rows >= above[name].num_rows:
        return False
    return begins_at_mean(below[name], above[name])


def _grown(below: NamedTensors, above: NamedTensors, *, by_mean: bool) -> list[str]:
    """A warning where the delta has more tokens than the base."""
    rows = {(below[name].num_rows, above[name].num_rows) for name in below if is_vocabulary(name)}
    start = "as the mean of the others, as for Stanford Alpaca" if by_mean else "as zeros, as for FastChat"
    return [
        f"the base has {few:,} tokens, the delta {many:,}: rows that the base lacks count {start}"
        for few, many in sorted(rows)
        if few != many
    ]


def _require_delta(below: NamedTensors, above: NamedTensors, delta: Checkpoint) -> None:
    """Refuses a whole model in place of a delta: its last norm nearly equals the base's."""
    name: Any = next((name for name in below if name.endswith(NORM) and ".layers." not in name), None)
    if name is None:
        return
    norm, added = (side[name].read().astype(np.float64) for side in (below, above))
    if np.abs(added - norm).mean() < 0.5 * np.abs(norm).mean():
        raise MalformedInput(
            f"`{name}` of `{delta.path.absolute().name}` nearly equals the base's: it is a whole model, not a delta",
            hint="give the published delta; `llmconv delta extract BASE TUNED` makes one of two models",
        )


def require_difference(folder: Path) -> None:
    """Raises InputRefused, which describes the expected files, for a path that is not a delta of any kind."""
    if folder.is_dir() and (is_bin_folder(folder) or list(folder.glob("*.safetensors"))):
        return
    raise InputRefused(
        f"`{folder}` is not a delta",
        hint="give a folder that `llmconv delta extract` made, one of FastChat's (a Hugging Face folder), "
        "or one of LLaMA2-Accessory's (`consolidated.NN-of-MM.model-diff.pth`)",
    )
