"""StoredTensor: a tensor as transformers loads it, read from its file or computed when it is sliced, maybe scaled."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    build_glob_alternation,
    rename_source_key,
)

from llmconv.causal_lm import mtp_tensors
from llmconv.checkpoint import HEADS, NO_HEAD, refuse_copies
from llmconv.errors import MalformedInput, UnsupportedInput, listing, word
from llmconv.files.safetensors_file import FileTensor
from llmconv.files.source_file import read_into
from llmconv.not_a_model_folder import refuse_unexplained_codes
from llmconv.tensors import LazyTensor

ALIGNMENT = 64  # bytes of a cache line; the rounding of sums of products depends on the alignment of a matrix
# integer types by size in bytes; torch converts these from numpy, unlike bfloat16
INTEGERS = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}
# dtypes with the exponent range of float32: scaling by a small power of two is exact
WIDE = {torch.bfloat16, torch.float32}
# the factor of a tensor by its name and shape: a power of two, so that the scaled weight is exact; 1 for unscaled
ScaleFactors = Callable[[str, Sequence[int]], float]


class StoredTensor:
    """A tensor that is read when it is sliced: of a file, where `stored` is its slice of `safe_open`, or computed.

    One of a file in its stored dtype gets the alignment that it would have if the file were mapped, as by
    `from_pretrained`. Otherwise it gets the `dtype` of the model; `factor` is a power of two for every value.
    """

    def __init__(self, stored: Any, tensor: LazyTensor, dtype: torch.dtype, factor: float = 1.0) -> None:
        self._stored, self._lazy, self._dtype, self._factor = stored, tensor, dtype, factor
        self.shape = tensor.shape
        self.dtype: torch.dtype = getattr(torch, tensor.dtype.name)

    def __getitem__(self, key: Any) -> torch.Tensor:
        """The whole tensor; transformers requests `[...]`."""
        tensor: torch.Tensor = self._stored[key] if self._stored is not None else self._computed(self.empty())
        if tensor.dtype is torch.float64 and self._dtype is not torch.float64:
            return self._scaled(tensor.float())  # as in a load in float32
        if self._factor != 1.0:
            return self._scaled(tensor)
        is_stored = isinstance(self._lazy, FileTensor) and tensor.dtype is self._dtype
        return _aligned(tensor, self._lazy.offset) if is_stored else tensor  # type: ignore[attr-defined]

    @property
    def read_bytes(self) -> int:
        """Bytes of the tensor in memory; scaled float16 has float32."""
        unchanged = self._factor == 1.0 or self.dtype in WIDE
        size = self._lazy.dtype.itemsize if unchanged else max(4, self._lazy.dtype.itemsize)
        return self._lazy.nbytes // self._lazy.dtype.itemsize * size

    def empty(self) -> torch.Tensor:
        """Memory for `fill`; torch's own functions would make float64 of it while a model computes in float64."""
        return torch.from_numpy(np.empty(self._lazy.nbytes, np.uint8)).view(self.dtype).view(self.shape)

    def fill(self, buffer: torch.Tensor) -> torch.Tensor:
        """The whole tensor in its own dtype, in a buffer of that dtype and shape; scaled float16 in a new one."""
        if self._factor != 1.0 and self.dtype not in WIDE:
            return self[...]
        if isinstance(self._lazy, FileTensor):
            read_into(self._lazy.path, buffer.view(-1).view(torch.uint8).numpy().data, self._lazy.offset)
        else:
            self._computed(buffer)
        return buffer if self._factor == 1.0 else buffer.mul_(self._factor)

    def _computed(self, buffer: torch.Tensor) -> torch.Tensor:
        """Fills a buffer, a block of rows at a time."""
        for start, stop in self._lazy.blocks():
            rows = self._lazy.rows(start, stop).view(INTEGERS[self._lazy.dtype.itemsize])
            buffer.view(-1, *self.shape[1:])[start:stop] = torch.from_numpy(rows).view(self.dtype)
        return buffer

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Rows `start:stop`; a slice of `safe_open` would read the whole tensor."""
        integers = torch.from_numpy(self._lazy.rows(start, stop).view(INTEGERS[self._lazy.dtype.itemsize]))
        return self._scaled(integers.view(self.dtype))

    def _scaled(self, tensor: torch.Tensor) -> torch.Tensor:
        """The scaled tensor, in float32 or wider, where scaling by a power of two is exact."""
        if self._factor == 1.0 or not tensor.is_floating_point():
            return tensor
        return torch.mul(tensor.to(torch.promote_types(tensor.dtype, torch.float32)), self._factor)


def stored_tensors(
    tensors: Mapping[str, LazyTensor], dtype: torch.dtype, factors: ScaleFactors | None = None
) -> dict[str, StoredTensor]:
    """The weights of a model of a requested dtype by name, scaled by `factors`."""
    found = {tensor.path for tensor in tensors.values() if isinstance(tensor, FileTensor)}
    files = {path for path in found if path.suffix == ".safetensors"}  # not ranges of other files
    opened: dict[Path, Any] = {path: safe_open(path, "pt", device="cpu", backend="pread") for path in files}

    names = {path: set(file.keys()) for path, file in opened.items()}

    def stored(name: str, tensor: LazyTensor) -> StoredTensor:
        in_file = isinstance(tensor, FileTensor) and name in names.get(tensor.path, ())  # it may stand for another, too
        slices = opened[tensor.path].get_slice(name) if in_file else None  # type: ignore[attr-defined]
        return StoredTensor(slices, tensor, dtype, factors(name, tensor.shape) if factors else 1.0)

    return {name: stored(name, tensor) for name, tensor in tensors.items()}


def _aligned(tensor: torch.Tensor, offset: int) -> torch.Tensor:
    """The tensor, copied if its address is not congruent to `offset` modulo the cache line."""
    if (tensor.data_ptr() - offset) % ALIGNMENT == 0:
        return tensor
    buffer = torch.empty(tensor.nbytes + 2 * ALIGNMENT, dtype=torch.uint8)
    start = (offset - buffer.data_ptr()) % ALIGNMENT
    if start % tensor.itemsize:
        return tensor
    return buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)


# ends of the names of values that models compute, which old checkpoints store
BUFFERS = ("rotary_emb.inv_freq", "attn.bias", "attn.masked_bias", "attention.rope.freqs")


def require_loaded(model: Any, report: Mapping[str, Any], stored: Mapping[str, LazyTensor], folder: Path) -> None:
    """Requires that a model consists of the folder's weights, and these are all of its modules' weights.

    Tensors of modules that the model does not have, such as the vision tower of a language model or MTP heads, may be
    left over.
    `report` is the `output_loading_info` of `from_pretrained`. Raises MalformedInput if weights are missing
    (transformers makes them up) or there twice, the model leaves out weights of its modules or of further layers, or
    weights are integers without a quantization that explains them.
    """
    refuse_copies(copies_of(model, stored), stored, folder.name)
    names = sorted(report["missing_keys"])
    if names and all(name.endswith("_zero_point") for name in names):  # transformers would make them up
        raise UnsupportedInput(
            f"`{folder.name}` has no zero points, and compressed-tensors wants them where its `quantization_status` is "
            f"`frozen`: {listing(names)}",
            hint=f"run `llmconv to-hf {word(folder)} -o OUT --quant dequantize`, and give OUT",
        )
    if names or report["unexpected_keys"]:
        refuse_unexplained_codes(stored, model.config.to_dict())
    if names:
        problem = f"missing keys: {len(names)} tensors of the model are not in `{folder}`, first `{names[0]}`"
        hint = NO_HEAD if {*names} <= {*HEADS} else "is this the config.json of these weights?"
        raise MalformedInput(problem, hint=hint)
    parameters = {name for name, _ in model.named_parameters()}
    # unexpected tensors of modules that the model has, if only with another number or without the head's first part
    modules = {_module(name) for name in parameters}
    modules |= {module.partition(".")[2] for module in modules if "." in module}
    heads = mtp_tensors(report["unexpected_keys"], model.config.to_dict())
    unexpected = [name for name in sorted({*report["unexpected_keys"]} - {*heads}) if not name.endswith(BUFFERS)]
    if names := [name for name in unexpected if _module(name) in modules]:
        raise MalformedInput(
            f"{len(names)} unexpected keys: `{folder}` has weights that its model would leave out: {listing(names)}",
            hint="`config.json` describes another model, or another number of layers",
        )
    names = [name for name in stored if name in parameters or name.endswith(".weight")]
    kinds = {name: stored[name].dtype.name for name in names if "float" not in stored[name].dtype.name}
    if kinds and getattr(model, "hf_quantizer", None) is None:
        listed = listing([f"{name} ({kind})" for name, kind in kinds.items()])
        problem = f"`{folder}` has {len(kinds)} weights that are integers, and no quantization of `config.json`"
        hint = "copy the folder's own `config.json` again, or give the weights from before quantization"
        raise MalformedInput(f"{problem} explains them: {listed}", hint=hint)


def require_vocabulary(stored: Mapping[str, LazyTensor], config: Mapping[str, Any], folder: Path) -> None:
    """Raises MalformedInput if an embedding or a head of tokens does not have `vocab_size` rows."""
    text = config.get("text_config")
    size = (text if isinstance(text, Mapping) else config).get("vocab_size")
    for name, tensor in stored.items():
        if type(size) is int and name.endswith(OF_TOKENS) and tensor.shape[:1] != (size,):
            raise MalformedInput(
                f"`{name}` in `{folder}` has {list(tensor.shape)[:1]} rows, its `vocab_size` is {size}",
                hint="rows were added, cut or padded after the configuration was saved: give theirs; if "
                "the rows are all, `llmconv to-hf FOLDER --config FILE -o OUT` with FILE of the right `vocab_size`",
            )


OF_TOKENS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight", "lm_head.weight")


def copies_of(model: PreTrainedModel, names: Iterable[str]) -> dict[str, str]:
    """Stored names to another one that fills the same tensor of a model, which transformers would take or overwrite.

    They are equal to transformers, or one is a part of what is also stored whole (stacks of experts).
    """
    mapping = get_model_conversion_mapping(model)
    renamings = [rule for rule in mapping if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in mapping if isinstance(rule, WeightConverter)]
    rules = {pattern: number for number, rule in enumerate(converters) for pattern in rule.source_patterns}
    known, first = model.state_dict(), dict[str, tuple[str, int | None]]()
    copies: dict[str, str] = {}
    for name in names:
        new, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, known)
        rule = rules.get(str(pattern))
        other, others = first.setdefault(new, (name, rule))
        if other != name and new in known and (rule is None or rule != others):
            copies[name] = other
    return copies


def _module(name: str) -> str:
    """The module of a tensor, with `*` for every number: `model.layers.*.mlp.up_proj`."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name.rpartition(".")[0])


def kept_in_float32(model: PreTrainedModel, dtype: torch.dtype) -> re.Pattern[str] | None:
    """Pattern of the names of the tensors that `from_pretrained` loads in float32 in a model of another dtype."""
    plan = model._get_dtype_plan(dtype)
    return build_glob_alternation(list(plan))[0] if plan else None
