"""What a path is that no format claims, so that the error can name it and the way out."""

from __future__ import annotations

import re
from pathlib import Path

from llmconv.convert.adapters.foreign import foreign_kind
from llmconv.convert.deltas import DELTA_FILE
from llmconv.convert.formats import formats
from llmconv.errors import InputRefused, LlmconvError, MalformedInput, UnsupportedInput
from llmconv.pickles.machine import Stub
from llmconv.torch_file import explain_no_zip, is_torch_file, open_torch_file

PACKED = re.compile(r"\.(?:(?:pth?|bin|ckpt)\.(?:gz|bz2|xz|lzma|lz4|zst)|tar(?:\.\w+)?|tgz)$")
TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
MEGATRON = {"checkpoint_version", "args", "model"}
FOREIGN = {
    b"version https://git-lfs": "a pointer of Git LFS, whose file was not fetched (`git lfs pull`)",
    b"<!DOCTYPE html": "a web page; the download may need a login",
    b"<html": "a web page; the download may need a login",
    b"GGUF": "a GGUF file of llama.cpp",
    b"\x89HDF\r\n\x1a\n": "an HDF5 file, as Keras writes",
    b"\x7fELF": "a program",
    b"\x93NUMPY": "a numpy array",
}
"""First bytes of files that people take for checkpoints."""


def explain(path: Path) -> LlmconvError:
    """The error for a path that is of no known format."""
    if kind := foreign_kind(path):
        return UnsupportedInput(
            f"`{path.name}` is an adapter of {kind.title}",
            hint=f"merge it: `llmconv merge-lora BASE {path.name} -o OUT`",
        )
    return _explain_folder(path) if path.is_dir() else _explain_file(path)


def _explain_folder(folder: Path) -> LlmconvError:
    names = {entry.name for entry in folder.iterdir()}
    if DELTA_FILE in names:
        return UnsupportedInput(f"`{folder}` is a delta", hint="use `llmconv delta apply BASE DELTA -o OUT`")
    if "adapter_config.json" in names:
        return UnsupportedInput(f"`{folder}` is an adapter", hint="use `llmconv merge-lora BASE ADAPTER -o OUT`")
    if "config.json" in names and any(name.endswith(".safetensors") for name in names):
        return UnsupportedInput(
            f"`{folder}` already is a Hugging Face folder", hint="go on with `merge-lora` or `export`"
        )
    if any(name.endswith((".pdiparams", ".pdmodel")) for name in names):
        return UnsupportedInput(
            f"`{folder}` is a static graph of Paddle, which is not converted back",
            hint="give the folder with `model_state.pdparams` that it was exported from",
        )
    if "checkpoint" in names and any(name.startswith("zero_to_fp32") or name == "latest" for name in names):
        return UnsupportedInput(
            f"`{folder}` is a Lightning checkpoint that DeepSpeed wrote",
            hint=f"give the folder inside: `{folder / 'checkpoint'}`",
        )
    checkpoints = sorted(name for name in names if PACKED.search(name) or _is_torch(folder / name))
    if checkpoints:
        return InputRefused(
            f"`{folder}` is a folder with {len(checkpoints)} checkpoint file(s), not one of them",
            hint=f"name the file, such as `{folder / checkpoints[-1]}`",
        )
    return _unknown(folder)


def _is_torch(path: Path) -> bool:
    return path.suffix in TORCH_SUFFIXES and is_torch_file(path)


def _explain_file(path: Path) -> LlmconvError:
    if not path.is_file():
        return InputRefused(f"`{path}` is no regular file", hint="give a file or a folder")
    if not path.stat().st_size:
        return MalformedInput(f"`{path.name}` is empty", hint="copy it again from where it was saved")
    with open(path, "rb") as file:
        head = file.read(300)
    if head.startswith(b"PK") or is_torch_file(path):
        try:
            content = open_torch_file(path).content
        except LlmconvError as problem:
            return problem
        if isinstance(content, Stub):
            return UnsupportedInput(
                f"`{path.name}` is a whole object (`{str(content.function)[:80]}`), pickled with its class",
                hint="load it where its code is, and save its `state_dict()`",
            )
        if isinstance(content, dict) and "ds_version" in content:
            return InputRefused(
                f"`{path.name}` is one file of a DeepSpeed checkpoint", hint=f"give its folder, `{path.parent}`"
            )
        if isinstance(content, dict) and {*content} >= MEGATRON:
            return UnsupportedInput(
                f"`{path.name}` is one rank's file of Megatron-LM, which is not converted",
                hint="convert it with Megatron's own `tools/checkpoint/convert.py`, and go on from there",
            )
        keys = ", ".join(f"`{key}`" for key in list(content)[:4]) if isinstance(content, dict) else "no dict"
        return UnsupportedInput(
            f"`{path.name}` is a torch file, but of no known training format (it holds {keys})", hint=_known()
        )
    foreign = next((what for magic, what in FOREIGN.items() if head.startswith(magic)), None)
    if foreign:
        return UnsupportedInput(f"`{path.name}` is no training checkpoint, but {foreign}", hint=_known())
    no_zip = explain_no_zip(path, head)
    return no_zip if isinstance(no_zip, UnsupportedInput) else _unknown(path)


def _unknown(path: Path) -> LlmconvError:
    return UnsupportedInput(f"`{path.name}` is of no training format that llmconv knows", hint=_known())


def _known() -> str:
    return f"known formats: {', '.join(formats())}; `llmconv formats` tells what each looks like"
