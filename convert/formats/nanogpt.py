"""nanoGPT's `ckpt.pt`: `model`, `model_args`, `optimizer`, `iter_num`, `config`; becomes a GPT-2.

Layout (karpathy/nanoGPT `train.py`, `model.py`): GPT-2's names after torch.compile's `_orig_mod.`, every matrix as in
nn.Linear [out, in], where GPT-2's Conv1D is [in, out]; with `bias=False` there are no biases at all.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmconv.checkpoint import Checkpoint, transposed
from llmconv.convert.algebra import renamed, zeros
from llmconv.convert.assembly import contents_around, second_models, side_files_of
from llmconv.convert.fields import Fields
from llmconv.convert.formats import Format, has_sign_of
from llmconv.convert.models.completeness import WRAPPERS, as_loaded
from llmconv.convert.models.config_file import plain_fields, with_architecture
from llmconv.convert.state_dicts.files import Sign, StateFile, open_state
from llmconv.errors import MalformedInput
from llmconv.tensors import LazyTensor

FILE = "ckpt.pt"
SIZES = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")
END_OF_TEXT = 50256  # id of GPT-2's only special token; a smaller vocabulary (characters) has none
PARTS = ("ln_1", "ln_2", "attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
SAME = (  # names that are GPT-2's, too
    *("transformer.wte.weight", "transformer.wpe.weight", "transformer.ln_f.weight", "transformer.ln_f.bias"),
    *(f"transformer.h.{{}}.{part}.{kind}" for part in PARTS for kind in ("weight", "bias")),
    "lm_head.weight",
)
NAMES: dict[str, str | None] = {
    **{name: name for name in SAME},
    "transformer.h.{}.attn.bias": None,  # the causal mask of runs without flash attention
}
MATRIX = re.compile(r"\.c_\w+\.weight$")
OWN_NAMES = re.compile(r"^(?:_orig_mod\.|module\.)*transformer\.h\.\d+\.attn\.c_attn\.weight$")
"""Names that no other system has (its `train.py`)."""


def _file(path: Path) -> Path:
    return path / FILE if path.is_dir() else path


def _open(path: Path, config: Mapping[str, Any], tokenizer: Path | None) -> Checkpoint:
    found = _read(path)
    stated = found.around.get("model_args")
    hint = "the file was changed, or another program wrote it"
    given = Fields(stated if isinstance(stated, dict) else {}, path.name, "in `model_args` of `{}`", hint)
    args = {name: given.count(name) for name in SIZES}
    for name, odd in (("n_layer", args["n_layer"] > len(found.state)), ("n_head", args["n_embd"] % args["n_head"])):
        if odd:
            raise given.invalid(name, args[name])
    stored = {WRAPPERS.sub("", name): tensor for name, tensor in found.tensors().items()}
    masks = [name for name in stored if name.endswith(".attn.bias")]
    warnings = second_models(found)
    tensors = _with_biases(renamed(stored, NAMES, path.name), args, warnings)
    tensors = {
        name: transposed(tensor) if MATRIX.search(name) and len(tensor.shape) == 2 else tensor
        for name, tensor in tensors.items()
    }
    settings = with_architecture({**_config(args, found, warnings), **plain_fields(config, warnings)})
    settings = as_loaded(tensors, settings)
    if not (side_files := side_files_of(_file(path), tokenizer)):
        warnings.append("nanoGPT saves no tokenizer; give one with `--tokenizer` (GPT-2's, where the run used it)")
    version = "nanoGPT before 27 January 2023" if "bias" not in found.around["model_args"] else ""
    dropped = contents_around(found) + ((f"{len(masks)} causal masks, which the model computes",) if masks else ())
    return Checkpoint(path, FORMAT.name, tensors, settings, side_files, tuple(warnings), version, 1, dropped)


def _read(path: Path) -> StateFile:
    if (found := open_state(_file(path))) is None:
        raise MalformedInput(f"`{path.name}` contains no `model`", hint="give the `ckpt.pt` of a run")
    return found


def _with_biases(tensors: dict[str, LazyTensor], args: Mapping[str, int], warnings: list[str]) -> dict[str, LazyTensor]:
    """Adds zero biases to a run without biases, which computes the same."""
    parts = [f"transformer.h.{layer}.{part}" for layer in range(args["n_layer"]) for part in PARTS]
    modules = [*parts, "transformer.ln_f"]
    if any(f"{module}.bias" in tensors for module in modules):
        return tensors
    warnings.append("added zero biases, which compute the same: the run had none (`bias=False`), and GPT-2 needs them")
    full: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        full[name] = tensor
        if (module := name.removesuffix(".weight")) in modules:
            full[f"{module}.bias"] = zeros(tensor.dtype, tensor.shape[:1])
    return full


def _config(args: Mapping[str, int], found: StateFile, warnings: list[str]) -> dict[str, Any]:
    """GPT-2's config; exact GELU since 17 May 2023, else tanh; without `bias` from before 27 January 2023."""
    if not (is_old := "bias" not in found.around["model_args"]):
        warnings.append(
            "nanoGPT has the exact GELU since May 2023; for an older run give `activation_function` `gelu_new` with "
            "`--config`"
        )
    token = END_OF_TEXT if args["vocab_size"] > END_OF_TEXT else None
    return {
        "model_type": "gpt2",
        "vocab_size": args["vocab_size"],
        "n_positions": args["block_size"],
        "n_embd": args["n_embd"],
        "n_layer": args["n_layer"],
        "n_head": args["n_head"],
        "n_inner": 4 * args["n_embd"],
        "activation_function": "gelu_new" if is_old else "gelu",
        "layer_norm_epsilon": 1e-5,
        "bos_token_id": token,
        "eos_token_id": token,
        "tie_word_embeddings": True,
    }


FORMAT = Format(
    name="nanogpt",
    title="nanoGPT: `ckpt.pt`, or the folder it lies in",
    detect=lambda path: has_sign_of("nanogpt", _file(path)),
    sign=Sign(keys=("model_args",), names=OWN_NAMES),
    open=_open,
    covers="GPT-2 of any size, compiled or not, with and without biases",
    peek=lambda path: _read(path).tensors(),
)
