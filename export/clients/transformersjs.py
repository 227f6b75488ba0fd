"""transformers.js: `onnx/model.onnx` and its data `onnx/model.onnx_data`, …, which link to the graph and the weights.

The client insists on the folder `onnx/`, and a graph may name data only in its own folder or below. Yet onnxruntime
follows links as the Hugging Face cache has them: where the graph is a link too, its data may lie beside what that leads
to. So nothing is copied; a program that uploads or copies the folder follows the links and gets plain files, which the
client opens as well. (A hard link would do too, but onnx refuses weights that have one, in every graph of the folder.)

It also insists on a `generation_config.json`, which a folder without one then gets: the special tokens of its config.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx

from llmconv.errors import UsageProblem
from llmconv.export.clients import Client, ClientModel, EncodedGraphs, FileContent
from llmconv.files.safe_folder import Link
from llmconv.output.plan import json_bytes

GENERATION = "generation_config.json"
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
GRAPH = "transformersjs.graph"
"""Not `.onnx`: opened where it lies, it finds no data."""

PLACE = "onnx/model.onnx"
MAX_DATA_FILES = 100
"""`MAX_EXTERNAL_DATA_CHUNKS` of transformers.js 4.3."""


def files(model: ClientModel, graphs: EncodedGraphs) -> dict[str, FileContent]:
    """The graph with the data names that the client knows, and the links."""
    if len(graphs.weights) > MAX_DATA_FILES:
        raise UsageProblem(
            f"transformers.js takes at most {MAX_DATA_FILES} data files, and the weights lie in {len(graphs.weights)}",
            hint="write them into fewer: `-o OUT --max-shard-size SIZE`",
        )
    names = dict(zip(graphs.weights, data_names(len(graphs.weights)), strict=True))
    encoded = rename_data(graphs.encoded["unified"], names)
    links = {f"onnx/{name}": Link(f"../{file}") for file, name in names.items()}
    return {GRAPH: encoded, PLACE: Link(f"../{GRAPH}"), **links, **_generation(model)}


def _generation(model: ClientModel) -> dict[str, bytes]:
    """What transformers itself makes of a config where the file is missing."""
    if model.generation is not None:
        return {}
    tokens = {name: getattr(model.config, name, None) for name in TOKENS}
    told = {name: token for name, token in tokens.items() if token is not None}
    return {GENERATION: json_bytes({"_from_model_config": True, **told})}


def config(model: ClientModel, graphs: EncodedGraphs) -> dict[str, Any]:
    """How many data files to fetch; on a disk onnxruntime finds them itself."""
    return {"transformers.js_config": {"use_external_data_format": {"model.onnx": len(graphs.weights)}}}


def data_names(count: int) -> Sequence[str]:
    """`model.onnx_data`, `model.onnx_data_1`, …"""
    return ["model.onnx_data" + (f"_{number}" if number else "") for number in range(count)]


def rename_data(encoded: bytes, names: dict[str, str]) -> bytes:
    """The graph with other names for the files of its weights."""
    model = onnx.load_from_string(encoded)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = names[entry.value]
    return bytes(model.SerializeToString(deterministic=True))


CLIENT = Client(
    name="transformersjs",
    title="transformers.js: onnx/model.onnx and onnx/model.onnx_data, which are links",
    roles=("unified",),
    supports=(frozenset({"unified"}),),
    adds_graphs=True,
    file_names=(GRAPH, PLACE, "onnx/model.onnx_data"),
    files=files,
    config=config,
)
