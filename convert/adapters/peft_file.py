"""Files of PEFT's LoRA adapters: `adapter_config.json` next to `adapter_model.safetensors` or `adapter_model.bin`."""

from __future__ import annotations

from pathlib import Path

from llmconv.checkpoint import INDEX, SINGLE, read_json
from llmconv.convert.adapters.adapter import Adapter
from llmconv.convert.adapters.lora.config import parse_config
from llmconv.convert.adapters.peft_tensors import CONFIG, to_adapter
from llmconv.errors import InputRefused, MalformedInput
from llmconv.files.pickles.reader import TensorRef
from llmconv.files.pointer_files import refuse_git_lfs
from llmconv.files.safetensors_file import read_header
from llmconv.files.torch.reader import open_torch_file
from llmconv.tensors import LazyTensor

WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")


def open_adapter(path: Path, alpha: float | None = None, *, initial: bool = False) -> Adapter:
    """Opens an adapter folder (or the weights file in one).

    Args:
        path: the folder, or its `adapter_model.*` file.
        alpha: `lora_alpha` if the config does not contain it.
        initial: the adapter as it was before training is given too, or this is that adapter.

    Raises:
        InputRefused: config or weights are missing.
        MalformedInput: incomplete pairs, mismatched ranks, or values that are not finite.
        UnsupportedInput: a variant of LoRA that cannot be merged.
    """
    folder = path if path.is_dir() else path.parent
    if not (folder / CONFIG).is_file():
        raise _not_an_adapter(path)
    config = parse_config(read_json(folder / CONFIG), alpha, initial=initial)
    weights = next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)
    if weights is None:
        raise InputRefused(f"`{folder}` contains no adapter weights", hint=f"it needs `{WEIGHTS[0]}`")
    return to_adapter(folder, (weights,), config, read_tensors(weights))


GRAPH_ADAPTER = ".onnx_adapter"
"""Suffix of the files that `llmconv onnx-adapter` writes."""


def _not_an_adapter(path: Path) -> InputRefused:
    hint = "give the folder that PEFT's `save_pretrained` wrote, or another program's adapter, see docs/merging.md"
    if path.is_file():
        if path.suffix == GRAPH_ADAPTER:
            return InputRefused(
                f"`{path}` has the factors of an adapter for graphs", hint="give the adapter that it was made from"
            )
        refuse_git_lfs(path.read_bytes()[:64] if path.stat().st_size < 1024 else b"", path.name)
        return InputRefused(f"`{path}` is not an adapter: it has no `{CONFIG}` next to it", hint=hint)
    if any((path / name).is_file() for name in (SINGLE, INDEX)):
        return InputRefused(f"`{path}` is a model, not an adapter: it has no `{CONFIG}`", hint=hint)
    if (path / "delta.json").is_file():
        return InputRefused(
            f"`{path}` is a delta, not an adapter", hint=f"run `llmconv delta apply BASE {path} -o OUT`"
        )
    inner = sorted(path.glob(f"*/{CONFIG}"), key=lambda file: (len(file.parent.name), file.parent.name))
    if inner:
        names = ", ".join(file.parent.name for file in inner)
        hint = f"give one of its folders: {names}"
    elif not any(path.iterdir()):
        return InputRefused(f"`{path}` is an empty folder", hint="is the copy or the download complete?")
    return InputRefused(f"`{path}` is not a PEFT adapter: it has no `{CONFIG}`", hint=hint)


def read_tensors(path: Path) -> dict[str, LazyTensor]:
    """The tensors of a `.safetensors` file, or of a torch file with one state dict.

    Raises:
        MalformedInput: a torch file with other content.
    """
    if path.suffix == ".safetensors":
        return dict(read_header(path).tensors)
    torch_file = open_torch_file(path)
    content = torch_file.content
    if not isinstance(content, dict) or not all(isinstance(value, TensorRef) for value in content.values()):
        raise MalformedInput(f"`{path.name}` is not a plain state dict", hint="save the adapter again with PEFT")
    return {str(name): torch_file.tensor(str(name), ref) for name, ref in content.items()}
