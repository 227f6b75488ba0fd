"""What a model's weights are stored as: whether its head is its embedding, and the element type of each tensor.

transformers stores a tied matrix once, under the name of the embedding. A training checkpoint may contain it twice:
`tie_word_embeddings` says whether it is tied; where that is null, the values decide, when the output is planned.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmconv.causal_lm import architecture
from llmconv.checkpoint import HEADS, Checkpoint
from llmconv.convert.algebra import equal
from llmconv.convert.models import transformers_source
from llmconv.convert.models.completeness import DROPPED, depth_is_possible, why_not_built
from llmconv.errors import MalformedInput, UnsupportedInput, UsageProblem
from llmconv.files.safetensors_file import FileTensor
from llmconv.model_code import AUTO_MAP
from llmconv.not_a_model_folder import refuse_unexplained_codes
from llmconv.tensors import BY_NAME, FLOATS, DType, LazyTensor, cast

TIE = "tie_word_embeddings"
Tensors = dict[str, LazyTensor]
HEAD = HEADS[0]


def is_tied(config: Mapping[str, Any]) -> bool:
    """Whether head and embedding are one matrix when the file has only one (transformers' default is yes)."""
    parts = (config, config.get("text_config"))
    return all(part.get(TIE, True) for part in parts if isinstance(part, Mapping))


def set_everywhere(config: dict[str, Any], key: str, value: Any) -> None:
    """Sets a field of the config, and of its `text_config` if there is one, in place."""
    for part in (config, config.get("text_config")):
        if isinstance(part, dict):
            part[key] = value


def find_embedding(names: Iterable[str]) -> str | None:
    """The name of the only input embedding; None where it is not clear."""
    found = [name for name in names if name.endswith(transformers_source.EMBEDDINGS)]
    return found[0] if len(found) == 1 else None


def find_head(names: Iterable[str], embedding: str | None) -> str:
    """The name of the output head, or the one it would have next to this embedding."""
    found = [name for name in names if name.endswith(HEADS)]
    if len(found) == 1:
        return found[0]
    return HEADS[1] if (embedding or "").endswith("embed_in.weight") else HEAD


def lacks_head(tensors: Mapping[str, LazyTensor], config: Mapping[str, Any]) -> bool:
    """Whether a decoder was saved without its output head, which is not the embedding, as `AutoModel` does."""
    embedding = find_embedding(tensors)
    own = config.get(TIE, transformers_source.model_names(str(config.get("model_type"))).tied)
    return bool(embedding) and own is False and find_head(tensors, embedding) not in tensors


def settle_head(
    tensors: dict[str, LazyTensor], config: dict[str, Any], warnings: list[str], *, sampled: bool = False
) -> dict[str, Any]:
    """Drops, in place, an output head that is the embedding; returns the config with `tie_word_embeddings` set.

    Values are compared where the config ties them (a warning if they differ), or has null because the training format
    does not record it; with `sampled` only the first block of rows, enough to describe a checkpoint, not to convert it.
    """
    head = next((name for name in HEADS if name in tensors), None)
    embedding = next((name for name in tensors if name.endswith(transformers_source.EMBEDDINGS)), None)
    if head is None or embedding is None:
        return config
    tied, same = config.get(TIE, False), _same_bytes(tensors[head], tensors[embedding])
    if tied is False and not same:
        return config
    may_tie = tied or "lm_head.bias" not in tensors  # where nothing says so, a head with a bias is not tied
    if same or (may_tie and equal(tensors[head], tensors[embedding], sampled=sampled)):
        del tensors[head]
        return {**config, TIE: True}
    if tied:
        warnings.append(f"the configuration ties `{head}` to `{embedding}`, but they differ; both are kept")
    return {**config, TIE: False}


def settled(checkpoint: Checkpoint, *, sampled: bool = False) -> Checkpoint:
    """The training checkpoint after `settle_head`; a model with its own code, as it is.

    A Hugging Face folder keeps its tensors: of one whose configuration ties another head only that field changes, since
    engines would leave the head out.
    """
    if AUTO_MAP in checkpoint.config or (checkpoint.format == "hf" and not checkpoint.config.get(TIE)):
        return checkpoint  # its own code was compared with the tensors
    tensors, warnings = dict(checkpoint.tensors), list(checkpoint.warnings)
    config = settle_head(tensors, checkpoint.config, warnings, sampled=sampled)
    if checkpoint.format == "hf":
        tensors = dict(checkpoint.tensors)
    return replace(checkpoint, tensors=tensors, config=config, warnings=tuple(warnings))


VALUES = (
    "give the weights from before quantization, or those of its codes: `llmconv to-hf MODEL --quant dequantize -o OUT`"
)


def plain_tensors(checkpoint: Checkpoint, hint: str = VALUES) -> Tensors:
    """The tensors of a model without buffers; UnsupportedInput if they are quantized."""
    if checkpoint.config.get("quantization_config"):
        problem = f"`{checkpoint.path.absolute().name}` is quantized (`quantization_config`)"
        raise UnsupportedInput(problem, hint=hint)
    refuse_unexplained_codes(checkpoint, checkpoint.config)
    return {name: tensor for name, tensor in checkpoint.items() if not DROPPED.search(name)}


def with_tied_head(tensors: Mapping[str, LazyTensor], config: Mapping[str, Any], head: str = "") -> Tensors:
    """The tensors of a model, with a tied head (`head`, or its family's) that only the embedding stands for."""
    embedding = find_embedding(tensors)
    head = head or find_head(tensors, embedding)
    own = {head: tensors[embedding]} if embedding and head not in tensors and is_tied(config) else {}
    return {**tensors, **own}


def with_head(checkpoint: Checkpoint, embedding: str, *, tied: bool) -> dict[str, LazyTensor]:
    """The tensors, with the output head (`lm_head.weight`) added if it is tied to the embedding.

    `tied` is transformers' default for configs without `tie_word_embeddings`. Raises MalformedInput without an
    embedding, and without a head that is not tied.
    """
    tensors = dict(checkpoint.tensors)
    if HEAD in tensors:
        return tensors
    if embedding not in tensors or not checkpoint.config.get(TIE, tied):
        missing = HEAD if embedding in tensors else embedding
        raise MalformedInput(
            f"`{checkpoint.path.name}` has no `{missing}`", hint="the folder is incomplete; copy it again"
        )
    return {**tensors, HEAD: tensors[embedding]}


def _same_bytes(one: LazyTensor, other: LazyTensor) -> bool:
    """Whether two tensors are one by their place in a file; nothing is read."""
    if not (isinstance(one, FileTensor) and isinstance(other, FileTensor)):
        return one is other
    return (one.path, one.offset, one.shape, one.dtype) == (other.path, other.offset, other.shape, other.dtype)


NARROW = ("float16", "bfloat16")
FLOAT32 = BY_NAME["float32"]
FIELDS = ("dtype", "torch_dtype")
# Fields of transformers' classes: for any half precision, and for float16 alone
KEPT = ("_keep_in_fp32_modules_strict", "_keep_in_fp32_modules")
KEEPS, IN_FLOAT32 = "_keep_in_fp32_modules", re.compile(r"torch\.(?:float(?:32)?|FloatTensor)\b")
"""What the source of a model, or `__init__` of its parts, contains that has tensors in float32 whatever its type."""


def check_dtype(dtype: str) -> None:
    """Raises UsageProblem unless `dtype` is `keep` or a float type."""
    if dtype not in ("keep", *FLOATS):
        raise UsageProblem(f"unknown dtype `{dtype}`", hint="keep, float32, float16 or bfloat16")


def with_cast(checkpoint: Checkpoint, dtype: str) -> Checkpoint:
    """The checkpoint with its float weights rounded to `dtype` (or kept), and a config that says what they are.

    Raises UnsupportedInput for codes and another type, which their scales do not have.
    """
    if dtype != "keep" and checkpoint.config.get("quantization_config"):
        raise UnsupportedInput(
            "the model is quantized (`quantization_config`), and its codes have no other type",
            hint="give `--quant dequantize` (of `to-hf`) for the values of the codes, or leave `--dtype` out",
        )
    tensors = dict(checkpoint.tensors)
    if dtype != "keep":
        types = stored_types(tensors, checkpoint.config, dtype)
        tensors = {name: cast(tensor, types[name], name) for name, tensor in tensors.items()}
    adapter = checkpoint.adapter
    if adapter and dtype != "keep":
        own = {name: cast(tensor, BY_NAME[dtype], name) for name, tensor in adapter.tensors.items()}
        adapter = replace(adapter, tensors=own)
    return replace(checkpoint, tensors=tensors, config=with_dtype(checkpoint.config, tensors), adapter=adapter)


def with_stated_type(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with the values of its codes rounded to the type that its configuration states, or bfloat16."""
    config = checkpoint.config
    parts = [config, *(part for part in config.values() if isinstance(part, Mapping))]
    stated = (str(part.get(name)).removeprefix("torch.") for part in parts for name in FIELDS)
    dtype = BY_NAME[next((name for name in stated if name in FLOATS), "bfloat16")]
    tensors = {
        name: cast(tensor, dtype, name) if name in checkpoint.dequantized else tensor
        for name, tensor in checkpoint.items()
    }
    return replace(checkpoint, tensors=tensors, config=with_dtype(config, tensors))


def stored_types(tensors: Mapping[str, LazyTensor], config: Mapping[str, Any], dtype: str) -> dict[str, DType]:
    """The type of each tensor in a model of `dtype`, one of `FLOATS`; tensors other than floats keep theirs.

    float32 where transformers loads it so, as routers' biases and some norms: rounded, they would choose other experts.
    """
    kept = kept_in_float32(tensors, config, dtype)
    types = {name: FLOAT32 if name in kept else BY_NAME[dtype] for name in tensors}
    return {
        name: types[name] if tensor.dtype.name in ("float64", *FLOATS) else tensor.dtype
        for name, tensor in tensors.items()
    }


def kept_in_float32(tensors: Mapping[str, LazyTensor], config: Mapping[str, Any], dtype: str) -> frozenset[str]:
    """Names of the tensors that transformers loads in float32 whatever the type of the model.

    transformers itself is asked where the source of the model's class, or of a part of it, has such patterns.
    """
    # the sources of the model and its parts that have tensors in float32 in a model of another type
    kinds = dict.fromkeys(str(part.get("model_type")) for part in _parts(config))
    folders = [home for kind in kinds if (home := transformers_source.model_folder(kind))] if dtype in NARROW else []
    files = [folder / f"modeling_{folder.name}.py" for folder in folders]
    files = [file for file in files if file.is_file() and _has_signs(file.read_text())]
    if not files:
        return frozenset()
    name = "" if str(config.get("model_type")) in transformers_source.causal_lm_classes() else architecture(config)
    if not depth_is_possible(tensors, config) or why_not_built(config, name):
        return _named_in(files, tensors, dtype)
    from llmconv.convert.models.meta_model import NotBuildable, float32_names  # noqa: PLC0415 - torch

    try:
        return float32_names(config, name, tensors, dtype)
    except NotBuildable:
        return _named_in(files, tensors, dtype)


def _has_signs(text: str) -> bool:
    if KEEPS in text or not IN_FLOAT32.search(text):
        return KEEPS in text
    functions = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef))
    lines, makers = text.splitlines(), (node for node in functions if node.name == "__init__")
    return any(IN_FLOAT32.search("\n".join(lines[node.lineno - 1 : node.end_lineno])) for node in makers)


def _named_in(files: Sequence[Path], names: Iterable[str], dtype: str) -> frozenset[str]:
    """The names that contain a word of any class in these sources: for a model that transformers does not build."""
    fields = KEPT if dtype == "float16" else KEPT[:1]
    values = [
        value
        for file in files
        for body in transformers_source.source(file).classes.values()
        for field in fields
        for value in transformers_source.assigned(body, field)
    ]
    words = [node.value for value in values for node in ast.walk(value) if isinstance(node, ast.Constant)]
    return frozenset(name for name in names if any(str(word) in name for word in words if word))


def _parts(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    inner = [value for value in config.values() if isinstance(value, Mapping)]
    return [config, *(part for value in inner for part in _parts(value))]


def with_dtype(config: Mapping[str, Any], tensors: Mapping[str, LazyTensor]) -> dict[str, Any]:
    """The config, and those of parts that have a type, with `torch_dtype` or `dtype` of most of the weights."""
    sizes: Counter[str] = Counter()
    for tensor in tensors.values():
        if tensor.dtype.name.startswith(("float", "bfloat")):
            sizes[tensor.dtype.name] += tensor.nbytes
    field = "dtype" if "dtype" in config and "torch_dtype" not in config else "torch_dtype"
    kept = {name: value for name, value in config.items() if name not in FIELDS}
    if not sizes:
        return kept
    stored = sizes.most_common(1)[0][0]
    return {**{name: _renamed_type(value, stored) for name, value in kept.items()}, field: stored}


def _renamed_type(part: Any, dtype: str) -> Any:
    """The config of a part with `dtype` where it names a type, at any depth; any other value as it is."""
    if not isinstance(part, Mapping):
        return part
    named = {name: dtype for name in FIELDS if isinstance(part.get(name), str) and "model_type" in part}
    return {**{name: _renamed_type(value, dtype) for name, value in part.items()}, **named}
