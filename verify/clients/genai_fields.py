"""Whether `genai_config.json` describes the verified graphs and the model, which no call of a graph shows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
from typing_extensions import TypeIs

from llmconv.checkpoint import read_json
from llmconv.errors import MalformedInput
from llmconv.runtime.context_length import language_config
from llmconv.runtime.onnxruntime.genai_guard import CONFIG, read_genai_config
from llmconv.verify.results.report import Check

NAME = "client fields"
"""Name of the check in reports."""

PAST, PRESENT = "past_key_values.%d.", "present.%d."
CACHE = {
    "inputs": {"past_key_names": f"{PAST}key", "past_value_names": f"{PAST}value"},
    "outputs": {"present_key_names": f"{PRESENT}key", "present_value_names": f"{PRESENT}value"},
}
"""Fields of the decoder with the names of its cache, which are also GenAI's defaults (0.18, `src/config.h`)."""

RANK = 4
"""Axes of a cache: batch, heads, tokens, size."""

SHOWN = 3
"""Number of differences in a message."""


def field_checks(folder: Path, models: Mapping[str, onnx.ModelProto], model: Path) -> list[Check]:
    """One check of the verified graphs by file name; none if the folder has no `genai_config.json`."""
    if not (folder / CONFIG).is_file():
        return []
    try:
        section, search = read_genai_config(folder), read_json(folder / CONFIG).get("search")
    except MalformedInput as refused:
        return [Check(NAME, CONFIG, "", verdict="fail", detail=refused.message)]
    found = [*_of_graphs(section, models), *_of_model(section, model), *_of_search(search, section, models)]
    if found:
        rest = f"; and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        return [Check(NAME, CONFIG, "", verdict="fail", detail="; ".join(found[:SHOWN]) + rest)]
    return [Check(NAME, CONFIG, "", detail="as the graphs and the model")]


def _of_graphs(section: Mapping[str, Any], models: Mapping[str, onnx.ModelProto]) -> Iterator[str]:
    """What differs between the decoder's fields and its graphs."""
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
    """The graphs of the decoder: one, or those of its pipeline."""
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

    config, generation = decoder_config(model), model / "generation_config.json"
    if config is None:  # a config class in the folder's own code, whose defaults are unknown
        return
    yield from _differences(section, {"vocab_size": int(config.vocab_size)}, "the model")
    given, longest = section.get("context_length"), context_length(config)
    if not _is_count(given) or given > longest:
        yield f"`context_length` is {given!r:.40}, and that of the model {longest}"
    tokens = special_tokens(config, read_json(generation) if generation.is_file() else {})
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


TOKEN_CHECK = "padding token"
"""Name of the check in reports."""

FIELD = "pad_token_id"
DEFAULT = 0
"""The client's padding token where its configuration has none (0.18, `src/config.h`)."""


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

    path = model / "generation_config.json"
    found, generation = decoder_config(model), read_json(path) if path.is_file() else {}
    config = found or SimpleNamespace(**language_config(model))
    has_own = generation.get(FIELD) is not None or getattr(config, FIELD, None) is not None
    if found is None and not has_own:
        return []
    tokens = special_tokens(config, generation)
    return [tokens[FIELD], *([] if has_own else tokens["eos_token_id"])]


def decoder_config(model: Path) -> Any | None:
    """The transformers config of the decoder; None where its class is in the folder's own code."""
    from transformers import AutoConfig  # noqa: PLC0415 - slow to import

    try:
        config = AutoConfig.from_pretrained(model, local_files_only=True, trust_remote_code=False)
    except Exception:  # a config class in the folder's own code, whose defaults are unknown
        return None
    return config.get_text_config(decoder=True)
