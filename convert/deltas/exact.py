"""Exact deltas: planning the files of a difference, opening them, and applying them to the same base.

A folder with `delta.json` (`{"delta": "exact", "version": 1, "files": […], "tensors": n, "removed": […]}`), files of
frames, and the tuned model's `config.json` and side files. Order and dtype of the tensors are the tuned model's. A
file of the base without changes is copied, and the copy is checked.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path

from llmconv.background import prefetch
from llmconv.checkpoint import Checkpoint, read_json, read_side_files
from llmconv.convert.deltas import DELTA_FILE
from llmconv.convert.deltas.exact_file import BaseTensor, DeltaTensor, open_frames
from llmconv.convert.deltas.exact_format import NEW_ROW_LIMIT, TENSORS_LIMIT, PredictedTensor, frame_pieces
from llmconv.convert.deltas.ulp_difference import can_predict
from llmconv.convert.models.config_file import without_code
from llmconv.convert.models.tied_head import HEAD, find_embedding
from llmconv.errors import InputRefused, MalformedInput, UnsupportedInput, listing
from llmconv.model_code import code_of
from llmconv.output.plan import Plan, Shard, json_bytes, plan_checkpoint
from llmconv.tensors import LazyTensor, as_bytes

VERSION = 1


def plan_exact(base: Checkpoint, tuned: Checkpoint, max_shard_size: str | int) -> Plan:
    """The files of an exact delta; no weights are read.

    Args:
        base: the model before tuning.
        tuned: the model after tuning.
        max_shard_size: as for `plan_checkpoint`.

    Raises:
        UsageProblem, InputRefused: see `plan_checkpoint`.
        UnsupportedInput: a new tensor with rows too large to be packed.
    """
    whole = plan_checkpoint(tuned, max_shard_size)
    predicted = {name: _predicted(name, tensor, base) for name, tensor in tuned.items()}
    groups = [group for shard in whole.shards for group in _groups(shard.tensors)]
    names = _frame_names(len(groups))
    container = partial(frame_pieces, predicted)
    shards = tuple(Shard(name, group, container) for name, group in zip(names, groups, strict=True))
    content = {
        "delta": "exact",
        "version": VERSION,
        "base": base.path.absolute().name,
        "files": names,
        "tensors": len(tuned),
        "removed": sorted(name for name in base if name not in tuned),
    }
    small = {**tuned.side_files, "config.json": json_bytes(tuned.config), DELTA_FILE: json_bytes(content)}
    return Plan(tuned, shards, small)


def _groups(tensors: Mapping[str, LazyTensor]) -> Iterator[dict[str, LazyTensor]]:
    """The tensors of a shard in groups that fit into one index."""
    items = list(tensors.items())
    for first in range(0, len(items), TENSORS_LIMIT):
        yield dict(items[first : first + TENSORS_LIMIT])


def _frame_names(count: int) -> list[str]:
    return ["delta.zst"] if count == 1 else [f"delta-{number:05}-of-{count:05}.zst" for number in range(1, count + 1)]


def _predicted(name: str, tensor: LazyTensor, base: Checkpoint) -> PredictedTensor:
    """A difference from the tensor of the same name; a new head from the embedding that it was tied to."""
    embedding = find_embedding(base)
    source = embedding if name == HEAD and name not in base and embedding else name
    if source in base and can_predict(base[source], tensor.dtype, tensor.shape):
        return PredictedTensor(tensor, source, base[source])
    if prod(tensor.shape[1:]) * tensor.dtype.itemsize > NEW_ROW_LIMIT:
        raise UnsupportedInput(
            f"`{name}` is new, and one row of it has more than {NEW_ROW_LIMIT:,} bytes",
            hint="publish the tuned model as it is",
        )
    return PredictedTensor(tensor)


@dataclass(frozen=True)
class ExactDelta:
    """An opened exact delta.

    Attributes:
        path: its folder.
        stored: the tuned model's tensors in order.
        base_name: name of the base's folder.
        config: the tuned model's `config.json`.
        side_files: the tuned model's.
    """

    path: Path
    stored: Mapping[str, DeltaTensor]
    base_name: str
    config: dict[str, object]
    side_files: Mapping[str, bytes]

    def over(self, base: Checkpoint) -> Checkpoint:
        """The tuned model; each row of the base is checked when it is read, which is once, or copied.

        Args:
            base: the base model.

        Raises:
            InputRefused: missing keys, shape or dtype mismatches: not the base that the delta was made from.
        """
        sources = self._sources()
        if missing := [name for name in sources if name not in base]:
            raise self._other_base(f"{len(missing)} missing keys: {listing(missing)}")
        kinds = {name: (tensor.dtype, tensor.shape) for name, tensor in base.items()}
        odd = [name for name, source in sources.items() if kinds[name] != (source.dtype, source.shape)]
        if odd:
            raise self._other_base(f"{len(odd)} tensors have another shape or dtype: {listing(odd)}")
        tensors = {
            name: one.over(base[one.base.name] if one.base else None, self._other_base)
            for name, one in self.stored.items()
        }
        code = without_code(self.config)[1]
        contained = any(name.endswith(".py") for name in self.side_files)
        note = f"the configuration refers to code, in {listing(code)}; the delta contains none"
        warnings = (note,) if code and not contained else ()
        return replace(
            base, format="hf", tensors=tensors, config=self.config, side_files=self.side_files, warnings=warnings
        )

    def check_base(self, base: Checkpoint, *, whole: bool) -> None:
        """Compares the sha256 of the base's tensors.

        Args:
            base: the base model.
            whole: all tensors, or only those with rows that `over` never reads.

        Raises:
            InputRefused: lists all tensors that differ.
        """
        sources = self._sources()
        if not whole:
            cut = {one.base.name for one in self.stored.values() if one.base and one.shape[:1] < one.base.shape[:1]}
            sources = {name: sources[name] for name in cut}
        if different := _different(sources, base):
            raise self._other_base(
                f"{len(different)} of {len(sources)} tensors have other values: {listing(different)}"
            )

    def _sources(self) -> dict[str, BaseTensor]:
        return {one.base.name: one.base for one in self.stored.values() if one.base}

    def _other_base(self, problem: str) -> InputRefused:
        return InputRefused(
            f"the base is not the one that `{self.path.absolute().name}` was made from: {problem}",
            hint=f"give the model that the delta was extracted from (its folder was called `{self.base_name}`)",
        )


def _different(sources: Mapping[str, BaseTensor], base: Checkpoint) -> list[str]:
    """The names of the base's tensors with another sha256."""
    digests = prefetch(partial(_sha256, base[name]) for name in sources)
    return [name for name, digest in zip(sources, digests, strict=True) if digest != sources[name].sha256]


def _sha256(tensor: LazyTensor) -> str:
    digest = hashlib.sha256()
    for block in tensor.blocks():
        digest.update(as_bytes(tensor.rows(*block)))
    return digest.hexdigest()


def open_exact(folder: Path) -> ExactDelta:
    """Opens the folder of an exact delta; reads only the indices of its files.

    Raises:
        UnsupportedInput: a later version.
        MalformedInput: a file is missing or damaged, or files of different deltas are mixed.
    """
    content = read_json(folder / DELTA_FILE)
    if content.get("delta") != "exact" or content.get("version") != VERSION:
        raise UnsupportedInput(
            f"`{folder.name}` is a delta of version {str(content.get('version'))[:20]!r}, this llmconv reads {VERSION}",
            hint="apply it with a later llmconv",
        )
    files, stored = content.get("files"), dict[str, DeltaTensor]()
    if not isinstance(files, list) or not all(isinstance(name, str) and Path(name).name == name for name in files):
        raise MalformedInput(f"`{DELTA_FILE}` does not list its files", hint="copy the delta again")
    for name in files:
        if not (folder / name).is_file():
            raise MalformedInput(f"`{name}` is missing from `{folder}`", hint="copy the delta again")
        more = open_frames(folder / name)
        if doubled := sorted(stored.keys() & more.keys()):
            raise MalformedInput(f"duplicate keys in `{name}`: {listing(doubled)}", hint="copy the delta again")
        stored |= more
    if len(stored) != content.get("tensors"):
        raise MalformedInput(
            f"`{folder.name}` contains {len(stored)} tensors, expected {str(content.get('tensors'))[:20]}",
            hint="files of different deltas are mixed; copy the delta again",
        )
    if not (folder / "config.json").is_file():
        raise MalformedInput(f"`config.json` is missing from `{folder}`", hint="copy the delta again")
    base_name = str(content.get("base"))[:200]
    config, side_files = read_json(folder / "config.json"), read_side_files(folder)
    with suppress(MalformedInput):  # code that is elsewhere, or not to be copied
        side_files |= code_of(folder, config, side_files)
    return ExactDelta(folder, stored, base_name, config, side_files)
