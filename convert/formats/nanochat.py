"""nanochat's `model_000650.pt` with `meta_000650.json` next to it, or the folder of a model tag; becomes a NanoChat.

Layout (karpathy/nanochat `nanochat/checkpoint_manager.py`, `gpt.py`): a flat state dict after torch.compile's
`_orig_mod.`, and JSON whose `model_config` has the sizes. Norms have no weights and torch's default epsilon, that of
float32 where nanochat computes in it; positions have the base 10,000, logits a soft cap of 15. Special tokens are the
last of the vocabulary (`tokenizer.py`, `SPECIAL_TOKENS`); a turn ends with `<|assistant_end|>`, a text with `<|bos|>`.

Since 11 January 2026 nanochat has more: scales of the residual stream, embeddings of values, windows. Neither
transformers' class nor any other one computes these models.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmconv.checkpoint import Checkpoint, read_json
from llmconv.convert.algebra import find_row, renamed
from llmconv.convert.assembly import side_files_of
from llmconv.convert.fields import Fields
from llmconv.convert.formats import Format, has_sign_of
from llmconv.convert.models.completeness import WRAPPERS, as_loaded
from llmconv.convert.models.config_file import plain_fields, with_architecture
from llmconv.convert.state_dicts.files import Sign, StateFile, open_state
from llmconv.errors import InputRefused, MalformedInput, UnsupportedInput, listing

STEP = re.compile(r"model_(\d{1,9})\.pt")
SIZES = ("sequence_len", "vocab_size", "n_layer", "n_head", "n_kv_head", "n_embd")
NAMES: dict[str, str | None] = {
    "transformer.wte.weight": "model.embed_tokens.weight",
    "lm_head.weight": "lm_head.weight",
    **{
        f"transformer.h.{{}}.{own}.weight": f"model.layers.{{}}.{target}.weight"
        for own, target in {
            **{f"attn.c_{one}": f"self_attn.{one}_proj" for one in "qkv"},
            "attn.c_proj": "self_attn.o_proj",
            "mlp.c_fc": "mlp.fc1",
            "mlp.c_proj": "mlp.fc2",
        }.items()
    },
}
OWN_NAMES = re.compile(r"^(?:_orig_mod\.|module\.)*transformer\.h\.\d+\.attn\.c_q\.weight$")
"""Names that no other system has (its `gpt.py`)."""
BOS, END_OF_TURN = 9, 5  # special tokens by their place from the end of the vocabulary
NO_CLASS = "no class of transformers computes it: its `nanochat` is the model of 2025; run it with nanochat"


def _file(path: Path) -> Path:
    """The file of the newest step in a folder; `path` itself if it is a file or has none."""
    if not path.is_dir():
        return path
    steps = {int(found[1]): entry for entry in path.iterdir() if (found := STEP.fullmatch(entry.name))}
    return steps[max(steps)] if steps else path


def _open(path: Path, config: Mapping[str, Any], tokenizer: Path | None) -> Checkpoint:
    file, warnings = _file(path), list[str]()
    stored = {WRAPPERS.sub("", name): tensor for name, tensor in _read(path).tensors().items()}
    args = _sizes(file, len(stored))
    if more := [name for name in stored if find_row(name, NAMES)[0] is None]:
        raise UnsupportedInput(f"`{file.name}` is a nanochat model that has {listing(more)}, too", hint=NO_CLASS)
    tensors = renamed(stored, NAMES, path.name)
    settings = as_loaded(tensors, with_architecture({**_config(args), **plain_fields(config, warnings)}))
    if not (side_files := side_files_of(file, tokenizer)):
        warnings.append("nanochat keeps its tokenizer in another folder, as a pickle; give one with `--tokenizer`")
    step = file.stem.removeprefix("model_").lstrip("0") or "0"
    return Checkpoint(path, FORMAT.name, tensors, settings, side_files, tuple(warnings), f"nanochat, step {step}")


def _read(path: Path) -> StateFile:
    if (found := open_state(_file(path))) is None:
        raise MalformedInput(f"`{path.name}` contains no weights", hint="give the `model_….pt` of a run")
    return found


def _sizes(file: Path, tensors: int) -> dict[str, int]:
    """The sizes in the file next to the weights; InputRefused if it is missing, MalformedInput if they are invalid."""
    meta = file.with_name(f"{file.stem.replace('model_', 'meta_', 1)}.json")
    if meta == file or not meta.is_file():
        raise InputRefused(
            f"`{file.name}` is of nanochat, and its sizes are in `{meta.name}`, which is not next to it",
            hint="copy that file of the run, too",
        )
    stated = read_json(meta).get("model_config")
    stated = stated if isinstance(stated, dict) else {}
    given = Fields(stated, meta.name, "in `model_config` of `{}`", "the file was changed, or another program wrote it")
    args = {name: given.count(name) for name in SIZES}
    for name, odd in (
        ("n_layer", args["n_layer"] > tensors),
        ("n_head", args["n_embd"] % args["n_head"]),
        ("n_kv_head", args["n_head"] % args["n_kv_head"]),
        ("vocab_size", args["vocab_size"] < BOS),
    ):
        if odd:
            raise given.invalid(name, args[name])
    if more := sorted(f"{name}" for name in stated.keys() - {*SIZES}):
        raise UnsupportedInput(f"`{file.name}` is a nanochat model that has {listing(more)}, too", hint=NO_CLASS)
    return args


def _config(args: Mapping[str, int]) -> dict[str, Any]:
    begin, end = args["vocab_size"] - BOS, args["vocab_size"] - END_OF_TURN
    return {
        "model_type": "nanochat",
        "vocab_size": args["vocab_size"],
        "hidden_size": args["n_embd"],
        "intermediate_size": 4 * args["n_embd"],
        "num_hidden_layers": args["n_layer"],
        "num_attention_heads": args["n_head"],
        "num_key_value_heads": args["n_kv_head"],
        "max_position_embeddings": args["sequence_len"],
        "hidden_act": "relu2",
        "rms_norm_eps": 2.0**-23,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "final_logit_softcapping": 15.0,
        "attention_bias": False,
        "bos_token_id": begin,
        "eos_token_id": [end, begin],
        "pad_token_id": None,
        "tie_word_embeddings": False,
    }


FORMAT = Format(
    name="nanochat",
    title="nanochat: `model_….pt` next to its `meta_….json`, or the folder of both",
    detect=lambda path: has_sign_of("nanochat", _file(path)),
    sign=Sign(names=OWN_NAMES),
    open=_open,
    covers="models of any size from before 11 January 2026, compiled or not; the newest step of a folder",
    peek=lambda path: _read(path).tensors(),
)
