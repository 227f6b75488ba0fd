"""Reading a PEFT LoRA adapter: its config, its pairs A and B, and the whole tensors it brings.

Layout (PEFT `save_pretrained`, peft/utils/save_and_load.py): `adapter_config.json` beside `adapter_model.safetensors`
or `adapter_model.bin`; tensors `base_model.model.<module>.lora_A.weight` (r×in), `.lora_B.weight` (out×r),
`.lora_B.bias` (out), `.lora_embedding_A` (r×vocab), `.lora_embedding_B` (dim×r), `.lora_magnitude_vector` (out), for a
convolution r×in×k… and out×r×1…; trained rows as `.token_adapter.trainable_tokens_delta`, whole ones as
`<module>.weight`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

from llmconv.checkpoint import INDEX, SINGLE, read_json
from llmconv.convert.adapters.adapter import Adapter, Pair, check
from llmconv.convert.adapters.lora.block_diagonal import dense
from llmconv.convert.adapters.lora.config import LoraConfig, parse_config
from llmconv.convert.adapters.lora.saved_modules import Wholes, put
from llmconv.convert.adapters.lora.trainable_tokens import pair_tokens
from llmconv.errors import InputRefused, MalformedInput, UnsupportedInput
from llmconv.files.pickles.reader import TensorRef
from llmconv.files.pointer_files import refuse_git_lfs
from llmconv.files.safetensors_file import read_header
from llmconv.files.torch.reader import open_torch_file
from llmconv.tensors import LazyTensor

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"}
"""Path components that trainers put around modules."""

MAGNITUDE = re.compile(r"(?P<module>.+)\.lora_magnitude_vector(?:\.\w+)??(?:\.weight)?")
TOKENS = re.compile(r"(?P<module>.+?)(?:\.token_adapter)?\.trainable_tokens_delta(?:\.\w+)?")
TRAINING_ONLY = re.compile(r"\.lora_(?:velora_\w+|monteclora_\w+|mcsampler\w*)(?:\.|$)")
"""What VeLoRA and MonteCLoRA keep for training; PEFT's merge does not use it."""

FACTOR = re.compile(r"(?P<module>.+?)\.lora_(?P<kind>embedding_)?(?P<part>[AB])(?:\.\w+)??(?:\.(?P<leaf>weight|bias))?")


def open_adapter(path: Path, alpha: float | None = None, *, initial: bool = False) -> Adapter:
    """Opens an adapter folder (or the weights file in one).

    Args:
        path: the folder, or its `adapter_model.*` file.
        alpha: `lora_alpha` where the config does not carry it.
        initial: the adapter as it was before training is given too, or this is that one.

    Raises:
        InputRefused: config or weights are missing.
        MalformedInput: incomplete pairs, wrong ranks, or values that are not finite.
        UnsupportedInput: a kind of adapter that is not plain LoRA.
    """
    folder = path if path.is_dir() else path.parent
    if not (folder / CONFIG).is_file():
        raise _not_an_adapter(path)
    config = parse_config(read_json(folder / CONFIG), alpha, initial=initial)
    weights = next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)
    if weights is None:
        raise InputRefused(f"`{folder}` holds no adapter weights", hint=f"it needs `{WEIGHTS[0]}`")
    return to_adapter(folder, (weights,), config, read_tensors(weights))


def to_adapter(path: Path, weights: tuple[Path, ...], config: LoraConfig, tensors: Mapping[str, LazyTensor]) -> Adapter:
    """The adapter that `tensors` are, in the names that PEFT saves or gives at run time.

    Args:
        path: where it lies, for messages.
        weights: the files with the tensors.
        config: what its config says.
        tensors: all of them.

    Raises:
        MalformedInput, UnsupportedInput: see `open_adapter`.
    """
    found = _sort(tensors, weights[0].name)
    pairs = {module: _pair(module, parts, config) for module, parts in found.factors.items()}
    tokens = pair_tokens(found.tokens, config)
    whole, originals = found.wholes.all(), found.wholes.untrained(config.modules_to_save)
    adapter = Adapter(path, weights, path / CONFIG, config, pairs, whole, originals, tokens)
    check(adapter)
    return adapter


def _not_an_adapter(path: Path) -> InputRefused:
    hint = "give the folder that PEFT's `save_pretrained` wrote, or another program's adapter, see docs/merging.md"
    if path.is_file():
        refuse_git_lfs(path.read_bytes()[:64] if path.stat().st_size < 1024 else b"", path.name)
        return InputRefused(f"`{path}` is not an adapter: it has no `{CONFIG}` next to it", hint=hint)
    if any((path / name).is_file() for name in (SINGLE, INDEX)):
        return InputRefused(f"`{path}` is a model, not an adapter: it has no `{CONFIG}`", hint=hint)
    inner = sorted(path.glob(f"*/{CONFIG}"), key=lambda file: (len(file.parent.name), file.parent.name))
    if inner:
        names = ", ".join(file.parent.name for file in inner)
        hint = f"give one of its folders: {names}"
    elif not any(path.iterdir()):
        return InputRefused(f"`{path}` is an empty folder", hint="is the copy or the download complete?")
    return InputRefused(f"`{path}` is not a PEFT adapter: it has no `{CONFIG}`", hint=hint)


def read_tensors(path: Path) -> dict[str, LazyTensor]:
    """The tensors of a `.safetensors` file, or of a torch file that holds one state dict.

    Raises:
        MalformedInput: the file does not hold that.
    """
    if path.suffix == ".safetensors":
        return dict(read_header(path).tensors)
    torch_file = open_torch_file(path)
    content = torch_file.content
    if not isinstance(content, dict) or not all(isinstance(value, TensorRef) for value in content.values()):
        raise MalformedInput(f"`{path.name}` holds no plain state dict", hint="save the adapter again with PEFT")
    return {str(name): torch_file.tensor(str(name), ref) for name, ref in content.items()}


def plain_name(name: str) -> str:
    """The name without PEFT's `base_model.model.` and without what trainers wrap around modules."""
    parts = [part for part in name.split(".") if part not in WRAPPERS]
    if parts[0] == "module":
        parts = parts[1:]
    return ".".join(parts).removeprefix("base_model.model.")


@dataclass(frozen=True)
class _Sorted:
    """The tensors of a file: factors by module and part, whole ones, trained rows by module."""

    factors: dict[str, dict[str, LazyTensor]] = field(default_factory=dict)
    wholes: Wholes = field(default_factory=Wholes)
    tokens: dict[str, LazyTensor] = field(default_factory=dict)

    def place(self, plain: str) -> tuple[dict[str, LazyTensor], str] | None:
        """Where a tensor of this name goes, and under which key; None for a name that is not known."""
        if match := FACTOR.fullmatch(plain):
            key = (match["kind"] or "") + match["part"]
            key = "bias" if (key, match["leaf"]) == ("B", "bias") else key
            return self.factors.setdefault(match["module"], {}), key
        if match := MAGNITUDE.fullmatch(plain):
            return self.factors.setdefault(match["module"], {}), "magnitude"
        if match := TOKENS.fullmatch(plain):
            return self.tokens, match["module"]
        return None if "lora_" in plain else self.wholes.place(plain)


def _sort(tensors: Mapping[str, LazyTensor], file: str) -> _Sorted:
    """Every tensor goes to exactly one place."""
    result = _Sorted()
    for name, tensor in tensors.items():
        plain = plain_name(name)
        if TRAINING_ONLY.search(plain):
            continue
        if (home := result.place(plain)) is None:
            raise UnsupportedInput(
                f"`{file}` holds `{name}`, which plain LoRA does not have",
                hint="the adapter is of another kind; merge it with PEFT's `merge_and_unload`",
            )
        put(*home, tensor, f"`{file}` holds `{name}`", may_repeat=home[0] is result.wholes.trained)
    return result


def _pair(module: str, parts: dict[str, LazyTensor], config: LoraConfig) -> Pair:
    embedding = any(key.startswith("embedding_") for key in parts)
    prefix = "embedding_" if embedding else ""
    a, b, bias = parts.pop(f"{prefix}A", None), parts.pop(f"{prefix}B", None), parts.pop("bias", None)
    magnitude = parts.pop("magnitude", None)
    if a is None or b is None or parts:
        absent = "A" if a is None else "B" if b is None else "half of a second pair"
        raise MalformedInput(
            f"the adapter lacks {absent} of `{module}`",
            hint="the file is incomplete; save or copy the adapter again",
        )
    if (magnitude is not None) != config.dora:
        raise UnsupportedInput(
            f"the adapter {'has' if magnitude else 'lacks'} `lora_magnitude_vector` of `{module}`, and its config says "
            f"`use_dora` {str(config.dora).lower()}",
            hint="config and tensors are of different adapters; copy the adapter again",
        )
    a, b = dense(a, b, module, config.blocks)
    _check_shapes(module, a, b)
    return Pair(flat(a), flat(b), bias, embedding, magnitude, a.shape[2:])


def flat(tensor: LazyTensor) -> LazyTensor:
    """The tensor with one dimension for all behind the first: a convolution's product is one of such matrices."""
    shape = (tensor.shape[0], prod(tensor.shape[1:]))
    if tensor.shape == shape:
        return tensor
    return LazyTensor(tensor.dtype, shape, lambda start, stop: tensor.rows(start, stop).reshape(-1, shape[1]))


def _check_shapes(module: str, a: LazyTensor, b: LazyTensor) -> None:
    if len(a.shape) < 2 or len(b.shape) < 2 or 0 in (*a.shape, *b.shape):
        raise MalformedInput(
            f"A of `{module}` has shape {list(a.shape)}, B {list(b.shape)}: they were saved before they were gathered",
            hint="gather the parameters (ZeRO-3, FSDP) before saving the adapter",
        )
    if len(a.shape) != len(b.shape) or set(b.shape[2:]) - {1}:
        raise UnsupportedInput(
            f"A of `{module}` has shape {list(a.shape)}, B {list(b.shape)}: they are of no layer that is known",
            hint="the adapter is of another kind; merge it with PEFT's `merge_and_unload`",
        )
    if len(a.shape) > 2 and a.shape[0] % b.shape[1] == 0 and a.shape[0] > b.shape[1]:
        raise UnsupportedInput(
            f"`{module}` is a convolution with groups: A has shape {list(a.shape)}, B {list(b.shape)}",
            hint="its change has no groups, so no merged weight equals it; serve the adapter",
        )
    if a.shape[0] != b.shape[1]:
        raise MalformedInput(
            f"A of `{module}` has rank {a.shape[0]}, B has rank {b.shape[1]}", hint="copy the adapter again"
        )
