"""GGUF files of llama.cpp: the model in Hugging Face names, with its tokenizer; blocks are dequantized to float32.

F32, F16 and BF16 tensors keep their bits. The head is stored only where it is not the embedding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from llmconv.checkpoint import SENTENCE_MODULES, Checkpoint, is_model_folder, json_object
from llmconv.convert.algebra import equal
from llmconv.convert.assembly import side_files_of
from llmconv.convert.formats import Format
from llmconv.convert.formats.gguf.codes import filled, turned_in, types_by_name, with_codes, with_graph_codes
from llmconv.convert.formats.gguf.configs import FREQUENCIES, HINT, LONG, POOLINGS, Keys
from llmconv.convert.formats.gguf.names import in_hugging_face_names
from llmconv.convert.formats.gguf.save import KINDS, Stored, gguf_pieces, save
from llmconv.convert.formats.gguf.tokenizer import sampling_fields, special_ids, tokenizer_files
from llmconv.convert.models.completeness import as_loaded
from llmconv.convert.models.config_file import plain_fields, updated, with_architecture
from llmconv.errors import InputRefused, MalformedInput, UnsupportedInput, listing
from llmconv.files.gguf_file import GGUFFile, GGUFTensor, is_gguf, parts_of, read_gguf
from llmconv.files.source_file import open_source
from llmconv.output.plan import json_bytes
from llmconv.tensors import BY_NAME, LazyTensor, as_bytes, cast

EMBEDDING, HEAD = "token_embd.weight", "output.weight"
GENERATION = "generation_config.json"
GRAPHS = "graphs"  # the `quant` of an export, which has an operator for every type


def _files(path: Path) -> list[Path]:
    """The GGUF file at a path, or those in a folder without another model."""
    if path.is_file():
        return [path] if is_gguf(path) else []
    if not path.is_dir() or is_model_folder(path):
        return []
    return [file for file in sorted(path.iterdir()) if file.suffix.lower() == ".gguf" and is_gguf(file)]


def _read(path: Path) -> GGUFFile:
    """The metadata of a model, and the tensors of all its files; InputRefused for several models."""
    files = _files(path)
    parts = parts_of(files[0])
    if others := sorted(file.name for file in {*files} - {*parts}):
        raise InputRefused(
            f"`{path}` contains several GGUF models: {listing([files[0].name, *others])}", hint="give one of the files"
        )
    first, *rest = (read_gguf(part) for part in parts)
    tensors: dict[str, GGUFTensor] = dict(first.tensors)
    for part in rest:
        if both := sorted(tensors.keys() & part.tensors.keys()):
            raise MalformedInput(f"two parts of `{path.name}` contain the same tensors: {listing(both)}", hint=HINT)
        tensors |= part.tensors
    wanted = first.metadata.get("split.tensors.count", len(tensors))
    if wanted != len(tensors):
        raise MalformedInput(f"the parts of `{path.name}` contain {len(tensors)} of {wanted} tensors", hint=HINT)
    return GGUFFile(first.metadata, tensors, first.places)


def _open(path: Path, config: Mapping[str, Any], tokenizer: Path | None) -> Checkpoint:
    found, warnings = _read(path), list[str]()
    keys = Keys.of(found.metadata, path.name)
    if (kind := found.metadata.get("general.type", "model")) != "model" or keys.architecture == "clip":
        what = "the part of a model that sees images" if keys.architecture == "clip" else f"no model but `{kind}`"
        raise UnsupportedInput(f"`{path.name}` is {what}", hint="give the GGUF file of the language model")
    stored: dict[str, LazyTensor] = {name: tensor.values for name, tensor in found.tensors.items()}
    if EMBEDDING not in stored or len(stored[EMBEDDING].shape) != 2:
        raise MalformedInput(f"`{path.name}` has no embedding (`{EMBEDDING}`)", hint=HINT)
    tokens, rows = found.metadata.get("tokenizer.ggml.tokens", []), stored[EMBEDDING].num_rows
    if isinstance(tokens, list) and len(tokens) not in (0, rows):
        raise MalformedInput(f"`{path.name}` has {len(tokens)} tokens, and an embedding of {rows}", hint=HINT)
    if HEAD in stored and equal(stored[HEAD], stored[EMBEDDING]):
        del stored[HEAD]
    settings, tensors = in_hugging_face_names(keys, stored)
    if config.get("quant") == "keep":
        own = {name: found.tensors[name] for name in stored}
        settings, tensors, notes_of_codes = with_codes(keys, own, settings, tensors)
        warnings += notes_of_codes
    if config.get("quant") == GRAPHS:
        own = {name: found.tensors[name] for name in stored}
        settings, tensors = with_graph_codes(keys, own, settings, tensors)
    settings |= {
        "vocab_size": rows,
        "tie_word_embeddings": HEAD not in stored,
        **special_ids(found.metadata, path.name),
    }
    fields = {name: value for name, value in config.items() if name != "quant"}
    settings = with_architecture(updated(settings, plain_fields(fields, warnings)))
    settings = settings if "quantization_config" in settings else as_loaded(tensors, settings)
    side_files = side_files_of(path, tokenizer) if tokenizer else tokenizer_files(found.metadata, path.name, warnings)
    side_files |= _modules(keys, found.metadata, settings, warnings)
    if sampling := sampling_fields(found.metadata, path.name, warnings):
        generation = json_object(side_files.get(GENERATION, b"{}")) or {}
        side_files[GENERATION] = json_bytes({**sampling, **generation})
    counts = Counter(tensor.type for tensor in found.tensors.values())
    types = ", ".join(f"{count} {kind}" for kind, count in counts.most_common())
    dropped = [name for name in (FREQUENCIES, *LONG) if name in found.tensors]
    notes = (f"{listing(dropped)}, which the configuration describes",) if dropped else ()
    shards = len(parts_of(_files(path)[0]))
    return Checkpoint(
        path, FORMAT.name, tensors, settings, side_files, tuple(warnings), f"llama.cpp ({types})", shards, notes
    )


def _modules(
    keys: Keys, metadata: Mapping[str, Any], settings: Mapping[str, Any], warnings: list[str]
) -> dict[str, bytes]:
    """The files of sentence-transformers for the pooling that a file states; none without one."""
    number = metadata.get(f"{keys.architecture}.pooling_type")
    mode = next((name for name, one in POOLINGS.items() if one == number), None) if type(number) is int else None
    if mode is None:
        return {}
    kinds = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
    listed = [
        {"idx": at, "name": str(at), "path": home, "type": f"sentence_transformers.models.{kind}"}
        for at, (home, kind) in enumerate(kinds)
    ]
    fields = {"mean": "mean_tokens", "cls": "cls_token", "lasttoken": "lasttoken"}
    config: dict[str, Any] = {"word_embedding_dimension": settings["hidden_size"]}
    config |= {f"pooling_mode_{field}": name == mode for name, field in fields.items()}
    warnings.append("embeddings have length 1 (`2_Normalize`), as llama.cpp returns them; the file does not state it")
    return {SENTENCE_MODULES: json_bytes(listed), "1_Pooling/config.json": json_bytes(config)}


def tensor_types(path: Path) -> dict[str, str]:
    """llama.cpp's type of each matrix, by the Hugging Face name that `FORMAT.open` gives it."""
    found = _read(path)
    return types_by_name(Keys.of(found.metadata, path.name), found.tensors)


def turned_names(path: Path) -> set[str]:
    """The matrices, by Hugging Face name, of which some rows are columns in the file, where blocks are along rows."""
    found = _read(path)
    keys = Keys.of(found.metadata, path.name)
    turned = turned_in(keys.architecture, found.tensors)
    marked = {name: filled(tensor.values, int(name in turned)) for name, tensor in found.tensors.items()}
    tensors = in_hugging_face_names(keys, marked)[1]
    return {name for name, one in tensors.items() if len(one.shape) > 1 and one.rows(0, 1).any()}


def in_float32(path: Path) -> Iterator[bytes | memoryview]:
    """Yields a GGUF file with the metadata of a model, byte for byte, and its values in float32, as one part."""
    found, first = _read(path), parts_of(_files(path)[0])[0]
    with open_source(first) as file:
        head = file.read(max(stop for _, stop in found.places.values()))
    kept = {
        key: head[start:stop]
        for key, (start, stop) in found.places.items()
        if not key.startswith("split.") and key != "general.alignment"
    }
    tensors = {name: cast(tensor.values, BY_NAME["float32"], name) for name, tensor in found.tensors.items()}
    stored = {name: Stored("F32", tensor.shape, tensor) for name, tensor in tensors.items()}
    for piece in gguf_pieces(tensors, metadata=kept, stored=stored):
        if isinstance(piece, LazyTensor):
            yield from (as_bytes(piece.rows(*block)) for block in piece.blocks())
        else:
            yield piece


FORMAT = Format(
    name="gguf",
    title="GGUF of llama.cpp: a file, the first of several parts, or the folder of one",
    detect=lambda path: bool(_files(path)),
    open=_open,
    covers="Llama, Mistral, Mixtral, Granite, SmolLM3, Qwen 2, 2.5, 3 and 3 MoE, Gemma 1 to 3 (text), Phi-3 and 4, "
    "GPT-OSS, DeepSeek V2 and V3, LFM2, GLM 4, OLMo 2, EXAONE 4, Command R and Cohere 2, Ernie 4.5, Hunyuan (dense), "
    "StableLM, StarCoder2, GPT-2, BLOOM, Falcon, MPT; F32, F16, BF16 bit for bit, Q4_0 to Q8_0, Q2_K to Q6_K, IQ4_NL, "
    "IQ4_XS, MXFP4, TQ1_0 and TQ2_0 dequantized",
    options=("quant",),
    save=save,
    dtypes={name: partial(save, kind=kind) for kind, name in KINDS.items()},
    peek=lambda path: {name: tensor.values for name, tensor in _read(path).tensors.items()},
)
