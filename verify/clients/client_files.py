"""Whether the graphs and weights that a client opens are those that were verified.

The few tokens of the other checks do not show a small difference, such as that of an adapter merged at weight 0.05.
Which graph files a client opens in a folder follows from its configuration and its own rules of choice, read in
onnxruntime-genai 0.18 (`src/config.cpp`), optimum-onnx 0.1 (`optimum/onnxruntime/modeling_decoder.py`) and
@huggingface/transformers 4.3 (`src/models/session.js`, `src/utils/dtypes.js`).
"""

from __future__ import annotations

import hashlib
import os
import posixpath
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from typing_extensions import TypeIs

from llmconv.causal_lm import generation_settings, language_config
from llmconv.checkpoint import read_json
from llmconv.errors import MalformedInput, listing
from llmconv.output.manifest import EMBEDDINGS, EMBEDDINGS_ROLE, MANIFEST, VISION, VISION_ROLE, read_manifest
from llmconv.runtime.onnxruntime.guard import external_fields, external_tensors
from llmconv.runtime.onnxruntime.session_file import CONFIG, named_files, read_genai_config
from llmconv.verify.bisect.replay import VerifiedFolder
from llmconv.verify.results import Check, audited

NAME = "client files"  # name of the check in reports
BLOCK = 1 << 20  # bytes of a weight file that are compared at a time
GRAPH_BYTES = (1 << 31) - 1  # largest graph, a limit of protobuf
LINKS = 8  # longest chain of recorded links

Place = tuple[str, int, tuple[int, ...], str, str]
"""Name, type and shape of a tensor, and its range of bytes in a weight file."""


@dataclass(frozen=True)
class ClientFiles:
    """Compares the files that clients open in a folder with the graphs of this run; `model` is the model's folder."""

    verified: VerifiedFolder
    model: Path

    def checks(self, client: str) -> list[Check]:
        """One check; none if the client finds no graph. MalformedInput if its configuration is refused."""
        opened = [path for path in OPENED[client](self.verified.path) if path.exists()]
        if not opened:
            return []
        problems = [problem for path in opened for problem in self._problems(path)]
        found = audited(NAME, client, problems, f"{listing([self._name(path) for path in opened])} as verified")
        return [replace(found, detail=f"{client}: {found.detail}")]

    @cached_property
    def graphs(self) -> dict[Path, onnx.ModelProto]:
        folder, entries = self.verified.path, self.verified.entries
        listed = {path.name for entry in entries for path in entry.paths(folder)} | {*self.verified.models}
        read = {folder / name: _parsed((folder / name).read_bytes()) for name in listed if (folder / name).is_file()}
        return {path: graph for path, graph in read.items() if graph is not None}

    @cached_property
    def _contents(self) -> dict[str, Path | None]:
        """The verified graphs by content; a variant of one that clients need has no file of its own here."""
        variants: dict[str, Path | None] = dict.fromkeys(map(_content, image_variants(self.graphs, self.model)))
        return variants | {_content(graph): path for path, graph in self.graphs.items()}

    def _problems(self, path: Path) -> Iterator[str]:
        name = self._name(path)
        if not path.is_file() or path.stat().st_size > GRAPH_BYTES:
            yield f"`{name}` is not a graph"
            return
        encoded = path.read_bytes()
        graph = _parsed(encoded)
        if graph is None:
            yield f"`{name}` is not an ONNX graph"
            return
        found = next((one for one in map(_content, (graph, *as_for_optimum(graph))) if one in self._contents), "")
        recorded = self._recorded(name)
        if not found and hashlib.sha256(encoded).hexdigest() != recorded:
            what = f", and its sha256 is not the one in `{MANIFEST}`" if recorded else ""
            yield f"it opens `{name}`, which is not one of the verified graphs{what}"
            return
        own = self._contents.get(found)
        yield from self._wrong_weights(path, graph, [own] if own else list(self.graphs))

    def _wrong_weights(self, path: Path, graph: onnx.ModelProto, graphs: Sequence[Path]) -> Iterator[str]:
        expected: dict[Place, set[Path]] = {}
        for one in graphs:
            for place, file in _places(one, self.graphs[one]):
                expected.setdefault(place, set()).add(file)
        pairs: dict[Path, set[Path]] = {}
        for place, file in _places(path, graph):
            if place not in expected:
                yield f"`{self._name(path)}` has the weights `{place[0][:80]}` elsewhere than the verified graphs"
                return
            pairs[file] = pairs.get(file, expected[place]) & expected[place]
        for file, wanted in pairs.items():
            if file.exists() and not any(_are_equal(file, one) for one in wanted):
                names = listing(sorted(map(self._name, wanted))) or "one file of the verified graphs"
                yield f"the weights in `{self._name(file)}` are not those in {names}"

    def _recorded(self, name: str) -> str:
        """The sha256 in the manifest of a file, or of the file that it was a link to; empty if there is none.

        It counts for models with images alone. All variants of a decoder are compared by content, and a recorded one
        may be of an earlier export than the verified graphs.
        """
        if VISION not in self.verified.models:
            return ""
        files = read_manifest(self.verified.path).files
        for _ in range(LINKS):
            entry = files.get(name, {})
            if not (link := entry.get("link")):
                return str(entry.get("sha256") or "")
            name = posixpath.normpath(posixpath.join(posixpath.dirname(name), link))
        return ""

    def _name(self, path: Path) -> str:
        return os.path.relpath(path, self.verified.path)


def _parsed(encoded: bytes) -> onnx.ModelProto | None:
    graph = onnx.ModelProto()
    try:
        graph.ParseFromString(encoded)
    except DecodeError:
        return None
    return graph


def _content(graph: onnx.ModelProto) -> str:
    """Equal for graphs that differ in the names of their weight files at most."""
    copy = onnx.ModelProto.FromString(graph.SerializeToString())
    for tensor in external_tensors(copy):
        for pair in tensor.external_data:
            pair.value = "" if pair.key == "location" else pair.value
    return hashlib.sha256(copy.SerializeToString(deterministic=True)).hexdigest()


def _places(path: Path, graph: onnx.ModelProto) -> Iterator[tuple[Place, Path]]:
    for tensor in external_tensors(graph):
        fields: Mapping[str, str] = external_fields(tensor)
        span = fields.get("offset", "0"), fields.get("length", "")
        yield (tensor.name, tensor.data_type, tuple(tensor.dims), *span), path.parent / fields.get("location", "")


def _are_equal(path: Path, other: Path) -> bool:
    if not path.is_file() or not other.is_file():
        return False
    if path.samefile(other):
        return True
    if path.stat().st_size != other.stat().st_size:
        return False
    with open(path, "rb") as mine, open(other, "rb") as theirs:
        while block := mine.read(BLOCK):
            if block != theirs.read(BLOCK):
                return False
    return True


IMAGE_TOKENS = ("image_token_id", "image_token_index")  # fields of `config.json` with the placeholder token


def as_for_optimum(graph: onnx.ModelProto) -> Iterator[onnx.ModelProto]:
    """The graph with the cache inputs that optimum may need in `model.onnx`, where other clients have it without.

    Nothing is yielded for a decoder whose cache has no fixed number and size of heads.
    """
    from llmconv.export.clients import EncodedGraphs  # noqa: PLC0415 - only for `--client`
    from llmconv.export.clients.optimum import accept_any_empty_past  # noqa: PLC0415

    encoded = graph.SerializeToString()
    past = EncodedGraphs({"unified": encoded}, {}, ()).past()
    if past and all(len(port.axes) == 4 and type(port.axes[1]) is type(port.axes[3]) is int for port in past):
        yield onnx.ModelProto.FromString(accept_any_empty_past(encoded, past))


def image_variants(graphs: Mapping[Path, onnx.ModelProto], model: Path) -> list[onnx.ModelProto]:
    """The variants of vision tower and embedding table among the graphs, for the placeholder token in `config.json`."""
    from llmconv.export.clients.genai import image_graphs  # noqa: PLC0415 - only for `--client`
    from llmconv.export.clients.transformersjs import variant  # noqa: PLC0415

    encoded = {path.name: graph.SerializeToString() for path, graph in graphs.items()}
    if VISION not in encoded or EMBEDDINGS not in encoded:
        return []
    parts = {VISION_ROLE: encoded[VISION], EMBEDDINGS_ROLE: encoded[EMBEDDINGS]}
    made = [variant(VISION_ROLE, parts[VISION_ROLE])]
    config = read_json(model / "config.json")
    tokens = [config[name] for name in IMAGE_TOKENS if type(config.get(name)) is int]
    with suppress(StopIteration, IndexError, KeyError, ValueError):  # parts of another form than GenAI's variants need
        made += image_graphs(tokens[0], parts).values()
    return [onnx.ModelProto.FromString(one) for one in made]


STANDARD_NAME = "model.onnx"  # the file that optimum prefers, in the folder and then in any folder inside
JS_FOLDER, JS_CONFIG = "onnx", "transformers.js_config"
JS_SUFFIXES = {"fp32": "", "q8": "_quantized"} | {  # end of a graph's name by the `dtype` of transformers.js
    name: f"_{name}" for name in ("fp16", "int8", "uint8", "bnb4", "q4", "q2", "q1", "q4f16", "q2f16", "q1f16")
}


def _optimum(folder: Path) -> list[Path]:
    """`model.onnx`; where there is none, every graph that may be chosen instead."""
    if (folder / STANDARD_NAME).exists():
        return [folder / STANDARD_NAME]
    found = sorted(folder.rglob("*.onnx"))
    return [path for path in found if path.name == STANDARD_NAME] or found


def _transformersjs(folder: Path) -> list[Path]:
    """The graphs in `onnx/` of the variety that `config.json` selects."""
    path = folder / "config.json"
    config = read_json(path).get(JS_CONFIG) if path.is_file() else None
    dtype = _js_dtype(config if isinstance(config, dict) else {})
    return [graph for graph in sorted((folder / JS_FOLDER).glob("*.onnx")) if _is_selected(graph.stem, dtype)]


def _js_dtype(config: Mapping[str, Any]) -> Any:
    """The `dtype` of a configuration, which the section of its device overrides."""
    devices = config.get("device_config")
    own = devices.get(str(config.get("device") or "cpu")) if isinstance(devices, dict) else None
    return {**config, **(own if isinstance(own, dict) else {})}.get("dtype")


def _is_selected(stem: str, dtype: Any) -> bool:
    """Whether a graph is of the selected variety: one for all graphs, or one for each."""
    suffix = max((suffix for suffix in JS_SUFFIXES.values() if stem.endswith(suffix)), key=len)
    wanted = dtype.get(stem.removesuffix(suffix)) if isinstance(dtype, dict) else dtype
    return suffix == JS_SUFFIXES.get(wanted if isinstance(wanted, str) else "", "")


OPENED: Mapping[str, Callable[[Path], list[Path]]] = {
    # every file that `genai_config.json` names, apart from configurations of processors
    "genai": lambda folder: [folder / name for name in named_files(folder)] if (folder / CONFIG).is_file() else [],
    "optimum": _optimum,
    "transformersjs": _transformersjs,
}


FIELDS_CHECK = "client fields"  # name of the check in reports
PAST, PRESENT = "past_key_values.%d.", "present.%d."
CACHE = {  # fields of the decoder with the names of its cache, which are also GenAI's defaults (0.18, `src/config.h`)
    "inputs": {"past_key_names": f"{PAST}key", "past_value_names": f"{PAST}value"},
    "outputs": {"present_key_names": f"{PRESENT}key", "present_value_names": f"{PRESENT}value"},
}

RANK = 4  # axes of a cache: batch, heads, tokens, size
SHOWN = 3  # number of differences in a message


def field_checks(folder: Path, models: Mapping[str, onnx.ModelProto], model: Path) -> list[Check]:
    """One check of the verified graphs by file name; none if the folder has no `genai_config.json`."""
    if not (folder / CONFIG).is_file():
        return []
    try:
        section, search = read_genai_config(folder), read_json(folder / CONFIG).get("search")
    except MalformedInput as refused:
        return [Check(FIELDS_CHECK, CONFIG, "", verdict="fail", detail=refused.message)]
    found = [*_of_graphs(section, models), *_of_model(section, model), *_of_search(search, section, models)]
    return [audited(FIELDS_CHECK, CONFIG, found, "as the graphs and the model", SHOWN)]


def _of_graphs(section: Mapping[str, Any], models: Mapping[str, onnx.ModelProto]) -> Iterator[str]:
    decoder = section.get("decoder")
    if not isinstance(decoder, dict):
        yield "it has no object `model.decoder`"
        return
    files = list(_files(decoder))
    if odd := [name for name in files if name not in models]:
        yield f"the decoder is `{odd[0]}`, and the verified graphs are {', '.join(f'`{name}`' for name in models)}"
    for name in dict.fromkeys(file for file in files if file in models):
        yield from _of_ports(decoder, name, models[name].graph)


def _files(decoder: Mapping[str, Any]) -> Iterator[Any]:
    pipeline = decoder.get("pipeline")
    for stage in pipeline if isinstance(pipeline, list) else [{"": decoder}]:
        for fields in stage.values() if isinstance(stage, dict) else ():
            yield fields.get("filename") if isinstance(fields, dict) else None


def _of_ports(decoder: Mapping[str, Any], file: str, graph: onnx.GraphProto) -> Iterator[str]:
    """What differs between the decoder's fields and the inputs and outputs of one of its graphs."""
    ports = {"inputs": {port.name: port for port in graph.input}, "outputs": {port.name: port for port in graph.output}}
    for side, names in CACHE.items():
        fields = decoder.get(side, {})
        fields = fields if isinstance(fields, dict) else {}
        for field, name in names.items():
            if fields.get(field, name) != name:
                yield f"`{field}` is {fields[field]!r:.80} instead of {name!r}"
        for field, name in fields.items():
            if field not in names and name not in ports[side]:
                yield f"`{side}.{field}` is {name!r:.80}, which `{file}` does not have"
    layers = sum(name.startswith(PAST.split("%")[0]) and name.endswith("key") for name in ports["inputs"])
    cache = ports["inputs"].get(CACHE["inputs"]["past_key_names"] % 0)
    axes = [dim.dim_value for dim in cache.type.tensor_type.shape.dim] if cache is not None else []
    sizes = {"num_hidden_layers": layers}
    if len(axes) == RANK:
        sizes |= {"num_key_value_heads": axes[1], "head_size": axes[3]}
    yield from _differences(decoder, {name: size for name, size in sizes.items() if size}, f"`{file}`")


def _of_model(section: Mapping[str, Any], model: Path) -> Iterator[str]:
    """What differs between the section `model` and the model's configuration."""
    from llmconv.export.clients.genai import context_length, special_tokens  # noqa: PLC0415 - only with this file

    config = decoder_config(model)
    if config is None:  # a config class in the folder's own code, whose defaults are unknown
        return
    yield from _differences(section, {"vocab_size": int(config.vocab_size)}, "the model")
    given, longest = section.get("context_length"), context_length(config)
    if not _is_count(given) or given > longest:
        yield f"`context_length` is {given!r:.40}, and that of the model {longest}"
    tokens = special_tokens(settings_of(model), int(config.vocab_size))
    ends, own = section.get("eos_token_id"), tokens["eos_token_id"]
    if {*(ends if isinstance(ends, list) else [ends])} != {*own}:
        yield f"`eos_token_id` is {ends!r:.80}, and the model ends at {own}"


def _of_search(search: Any, section: Mapping[str, Any], models: Mapping[str, onnx.ModelProto]) -> Iterator[str]:
    """What contradicts the graphs and the context in `search`; its other fields are the user's to choose."""
    fields, longest = search if isinstance(search, dict) else {}, section.get("context_length")
    given = fields.get("max_length")
    if given is not None and _is_count(longest) and (not _is_count(given) or given > longest):
        yield f"`max_length` is {given!r:.40}, above the `context_length` of {longest}"
    shared, kinds = fields.get("past_present_share_buffer"), {_shares_buffer(one.graph) for one in models.values()}
    if kinds - {None, shared}:
        yield f"`past_present_share_buffer` is {shared!r:.40}, and the cache of the graphs is another"


def _shares_buffer(graph: onnx.GraphProto) -> bool | None:
    """Whether past and present keys have the same length; None if the graph does not say so."""
    names = CACHE["inputs"]["past_key_names"] % 0, CACHE["outputs"]["present_key_names"] % 0
    found = [port.type.tensor_type.shape.dim for port in (*graph.input, *graph.output) if port.name in names]
    lengths = [dims[2].dim_param or dims[2].dim_value for dims in found if len(dims) == RANK]
    return lengths[0] == lengths[1] if len(lengths) == len(names) and all(lengths) else None


def _differences(fields: Mapping[str, Any], expected: Mapping[str, Any], origin: str) -> Iterator[str]:
    for name, value in expected.items():
        if fields.get(name) != value:
            yield f"`{name}` is {fields.get(name)!r:.40}, and that of {origin} {value}"


def _is_count(value: Any) -> TypeIs[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


TOKEN_CHECK = "padding token"  # name of the check in reports
FIELD = "pad_token_id"
DEFAULT = 0  # the client's padding token where its configuration has none (0.18, `src/config.h`)


def padding_checks(folder: Path, model: Path) -> list[Check]:
    """One check; none without a `genai_config.json`, which the client reports. MalformedInput if that is refused."""
    if not (folder / CONFIG).is_file():
        return []
    given = read_genai_config(folder).get(FIELD, DEFAULT)
    allowed, size = allowed_tokens(model), int(language_config(model)["vocab_size"])
    if not allowed:
        detail = f"genai: only the model's own code defines its `{FIELD}`"
        return [Check(TOKEN_CHECK, "genai", "", verdict="skip", detail=detail)]
    if given in allowed:
        return [Check(TOKEN_CHECK, "genai", "", detail=f"genai: {given}")]
    if not isinstance(given, int) or not 0 <= given < size:
        detail = f"genai: {given}, which is not in the vocabulary; the export sets {allowed[0]}"
        return [Check(TOKEN_CHECK, "genai", "", detail=detail)]
    origin = f"`{FIELD}` in `{CONFIG}` is {given}"
    if FIELD not in read_genai_config(folder):
        origin = f"`{CONFIG}` has no `{FIELD}`, and the client then pads with {given}"
    detail = (
        f"{origin}, while the export sets {allowed[0]}: the client ignores token {given} wherever a prompt of a batch "
        "contains it, and continues that prompt incorrectly"
    )
    return [Check(TOKEN_CHECK, "genai", "", verdict="fail", detail=detail)]


def allowed_tokens(model: Path) -> list[int]:
    """The token that `export --layout genai` sets; of a model without a padding token, all of its end tokens.

    Empty where the config class is in the model's own code, which is not run here, and no file states the token.
    """
    from llmconv.export.clients.genai import special_tokens  # noqa: PLC0415 - only for `--client`

    settings = settings_of(model)
    if decoder_config(model) is None and FIELD not in settings:
        return []
    tokens = special_tokens(settings, int(language_config(model)["vocab_size"]))
    return [tokens[FIELD], *([] if FIELD in settings else tokens["eos_token_id"])]


def settings_of(model: Path) -> dict[str, Any]:
    """See `generation_settings`."""
    config, path = model / "config.json", model / "generation_config.json"
    return generation_settings(
        read_json(config) if config.is_file() else {}, read_json(path) if path.is_file() else None
    )


def decoder_config(model: Path) -> Any | None:
    """The transformers config of the decoder; None where its class is in the folder's own code."""
    from transformers import AutoConfig  # noqa: PLC0415 - slow to import

    try:
        config = AutoConfig.from_pretrained(model, local_files_only=True, trust_remote_code=False)
    except Exception:  # a config class in the folder's own code, whose defaults are unknown
        return None
    return config.get_text_config(decoder=True)
