"""Variants of the verified graphs that `export --layout` writes for clients, made again to compare them by content."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import onnx

from llmconv.checkpoint import read_json
from llmconv.runtime.onnxruntime.embeddings import EMBEDDINGS
from llmconv.runtime.onnxruntime.graph_entry import EMBEDDINGS_ROLE, VISION_ROLE
from llmconv.runtime.onnxruntime.vision import VISION

IMAGE_TOKENS = ("image_token_id", "image_token_index")
"""Fields of `config.json` with the placeholder token."""


def as_for_optimum(graph: onnx.ModelProto) -> Iterator[onnx.ModelProto]:
    """The graph with the cache inputs that optimum may need in `model.onnx`, where other clients have it without.

    Args:
        graph: a decoder; nothing is yielded if its cache has no fixed number and size of heads.
    """
    from llmconv.export.clients import EncodedGraphs  # noqa: PLC0415 - only for `--client`
    from llmconv.export.clients.optimum import accept_any_empty_past  # noqa: PLC0415

    encoded = graph.SerializeToString()
    past = EncodedGraphs({"unified": encoded}, {}, ()).past()
    if past and all(len(port.axes) == 4 and type(port.axes[1]) is type(port.axes[3]) is int for port in past):
        yield onnx.ModelProto.FromString(accept_any_empty_past(encoded, past))


def image_variants(graphs: Mapping[Path, onnx.ModelProto], model: Path) -> list[onnx.ModelProto]:
    """The variants of a vision tower and an embedding table.

    Args:
        graphs: the verified graphs by their files.
        model: the model's folder, whose `config.json` has the placeholder token.
    """
    from llmconv.export.clients.genai_images import image_graphs  # noqa: PLC0415 - only for `--client`
    from llmconv.export.clients.transformersjs_images import variant  # noqa: PLC0415

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
