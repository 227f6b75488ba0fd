"""The modules after the decoder of an embedding model or a reranker, as sentence-transformers stores them.

    modules.json                       [{"path": "", "type": "….Transformer"}, {"path": "1_Pooling", …}, …]
    1_Pooling/config.json              {"pooling_mode": "lasttoken"}, or before version 6 one field per mode
    2_Dense/config.json                {"in_features": …, "out_features": …, "bias": …, "activation_function": …}
    2_Dense/model.safetensors          linear.weight, linear.bias
    3_Normalize, 1_LogitScore          {"true_token_id": …, "false_token_id": …} for a reranker

Source of the format: sentence-transformers 6.2, `base/modules` and `sentence_transformer/modules`. The types are only
compared by name: nothing is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from llmconv.checkpoint import SINGLE, own_file, parse_object, read_json, read_small
from llmconv.errors import InputRefused, MalformedInput, UnsupportedInput, short
from llmconv.files.safetensors_file import FileTensor, read_header

MODULES = "modules.json"

POOLING_MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
"""In the order in which sentence-transformers joins the results of several modes."""

OLD_FIELDS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}

ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "Sigmoid", "SiLU")
"""Classes of `torch.nn` that a Dense module may name."""

SIDE_FILES = (MODULES, "config_sentence_transformers.json", "sentence_bert_config.json")
"""Files that sentence-transformers reads besides those of the modules."""

COUNT_LIMIT = 20  # maximum number of modules; known models have up to five


@dataclass(frozen=True)
class Dense:
    """A linear layer with an activation from `ACTIVATIONS`, in a folder such as `2_Dense`."""

    path: str
    inputs: int
    outputs: int
    bias: bool
    activation: str


@dataclass(frozen=True)
class SentenceHead:
    """What follows the last hidden state: pooling, then linear layers and normalization in order."""

    pooling: tuple[str, ...]  # modes, whose results are joined in this order
    layers: tuple[Dense | str, ...] = ()  # each a `Dense`, or `normalize`


@dataclass(frozen=True)
class TokenScore:
    """The score of a reranker that generates: the logit of one token after the prompt, minus that of another."""

    true_token: int
    false_token: int | None  # None to take the first logit as it is


@dataclass(frozen=True)
class SentenceModules:
    """The modules of one folder."""

    head: SentenceHead | None  # pooling and what follows; None without a pooling module
    score: TokenScore | None  # the score of a reranker; None for other models
    tensors: Mapping[str, FileTensor]  # weights of the Dense modules, as `2_Dense.linear.weight`
    side_files: Mapping[str, bytes]  # content of the configuration files by path


def read_sentence_modules(folder: Path) -> SentenceModules | None:
    """The modules of a folder; None without a `modules.json`.

    Raises UnsupportedInput: a module of another kind, or an option of one that graphs do not compute; MalformedInput: a
    file is invalid; InputRefused: a Dense module has no safetensors weights.
    """
    if not (folder / MODULES).is_file():
        return None
    files = {name: read_small(own_file(folder, name)) for name in SIDE_FILES if (folder / name).is_file()}
    pooling: tuple[str, ...] = ()
    layers: list[Dense | str] = []
    score, tensors = None, dict[str, FileTensor]()
    for at, (kind, path) in enumerate(_listed(files[MODULES])):
        config = _config(folder, path, files) if path else {}
        if (kind == "Transformer") != (at == 0) or (score and kind != "Transformer"):
            _unsupported(f"the module `{kind}` at place {at + 1}")
        if kind == "Pooling" and not pooling and not layers:
            pooling = _pooling(config)
        elif kind == "LogitScore" and not pooling and not layers:
            first, second = config.get("true_token_id"), config.get("false_token_id")
            if not _is_count(first) or not (second is None or _is_count(second)):
                _malformed("LogitScore", "has token ids that are not numbers")
            _require_default(config, "module_input_name", "causal_logits")
            score = TokenScore(int(first), None if second is None else int(second))  # type: ignore[arg-type]
        elif kind == "Dense" and pooling:
            layers.append(dense := _dense(path, config))
            tensors |= _weights(folder, dense)
        elif kind == "Normalize" and pooling:
            _require_default(config, "module_input_name", "sentence_embedding")
            layers.append("normalize")
        elif kind not in ("Transformer", "Dropout"):
            _unsupported(f"the module `{kind}`" if pooling or kind not in ("Dense", "Normalize") else f"`{kind}` first")
    return SentenceModules(SentenceHead(pooling, tuple(layers)) if pooling else None, score, tensors, files)


def _listed(content: bytes) -> list[tuple[str, str]]:
    entries = parse_object(b'{"modules": ' + content + b"}", MODULES)["modules"]
    if not isinstance(entries, list) or not 1 <= len(entries) <= COUNT_LIMIT:
        _malformed(MODULES, "is not a list of modules")
    found = []
    for entry in entries:
        kind, path = (entry.get(name) if isinstance(entry, dict) else None for name in ("type", "path"))
        if not isinstance(kind, str) or not isinstance(path, str):
            _malformed(MODULES, "has a module without `type` or `path`")
        if path and (Path(path).name != path or path.startswith(".") or not path.isprintable() or "\\" in path):
            _malformed(MODULES, f"names the folder {path[:80]!r}")
        found.append((kind.rpartition(".")[2], path))
    if found[0][1]:
        _unsupported(f"a decoder in the folder `{found[0][1]}`")
    return found


def _config(folder: Path, path: str, files: dict[str, bytes]) -> dict[str, Any]:
    """The `config.json` of a module, which is added to `files`; empty without one."""
    if (folder / path).is_symlink():
        _malformed(MODULES, f"names `{path}`, which is a link")
    if not (folder / path / "config.json").is_file():
        return {}
    files[f"{path}/config.json"] = read_small(own_file(folder, f"{path}/config.json"))
    return read_json(folder / path / "config.json")


def _pooling(config: Mapping[str, Any]) -> tuple[str, ...]:
    given = config.get("pooling_mode")
    if given is None:
        given = [mode for field, mode in OLD_FIELDS.items() if config.get(field)] or "mean"
    modes = tuple(given) if isinstance(given, list) else (given,)
    if odd := [mode for mode in modes if mode not in POOLING_MODES]:
        _unsupported(f"the pooling mode {short(odd[0], 80)!r}")
    _require_default(config, "include_prompt", True)
    return modes


def _dense(path: str, config: Mapping[str, Any]) -> Dense:
    sizes = [config.get(name) for name in ("in_features", "out_features")]
    if not path or not all(_is_count(size) and size for size in sizes):
        _malformed(f"{path}/config.json", "has no `in_features` or `out_features`")
    for name, usual in (("module_input_name", "sentence_embedding"), ("use_residual", False)):
        _require_default(config, name, usual)
    _require_default(config, "module_output_name", config.get("module_input_name", "sentence_embedding"))
    given = str(config.get("activation_function", "torch.nn.modules.activation.Tanh"))
    activation = given.rpartition(".")[2]
    if not given.startswith("torch.nn.modules.") or activation not in ACTIVATIONS:
        _unsupported(f"the activation `{given[:80]}`")
    return Dense(path, int(sizes[0]), int(sizes[1]), bool(config.get("bias", True)), activation)  # type: ignore[arg-type]


def _weights(folder: Path, dense: Dense) -> dict[str, FileTensor]:
    """The tensors of a Dense module, named by its folder."""
    name = f"{dense.path}/{SINGLE}"
    if not (folder / name).is_file():
        raise InputRefused(
            f"`{dense.path}` has no `{SINGLE}`", hint="save the model again with sentence-transformers 3 or later"
        )
    tensors = read_header(own_file(folder, name)).tensors
    wanted = {"linear.weight": (dense.outputs, dense.inputs)} | (
        {"linear.bias": (dense.outputs,)} if dense.bias else {}
    )
    found = {key: tensor.shape for key, tensor in tensors.items()}
    if found != wanted:
        _malformed(name, f"has {found}, and its config declares {wanted}")
    return {
        f"{dense.path}.{key}": FileTensor(t.path, t.offset, t.dtype, t.shape, location=name)
        for key, t in tensors.items()
    }


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _require_default(config: Mapping[str, Any], field: str, usual: object) -> None:
    if (found := config.get(field, usual)) not in (usual, None):
        _unsupported(f"`{field}` = {short(found, 80)}")


def _unsupported(what: str) -> NoReturn:
    raise UnsupportedInput(
        f"graphs cannot compute {what} of this model's `{MODULES}`",
        hint="docs/embeddings.md lists the modules; without `modules.json` the graph returns `last_hidden_state` alone",
    )


def _malformed(name: str, problem: str) -> NoReturn:
    raise MalformedInput(f"`{name}` {problem}", hint="copy the folder of the model again")
