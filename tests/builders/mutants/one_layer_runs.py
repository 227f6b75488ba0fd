"""Runs of mutants of one layer: the layer is drawn at random, the folder is verified by induction over layers."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort

from llmconv.export import export
from llmconv.verify import verify
from llmconv.verify.layers.graph_index import NotLayered
from llmconv.verify.layers.induction import keep_layers
from tests.builders.mutants.mutants import MUTANTS, Mutant
from tests.builders.mutants.one_layer import NoPlace, WholeGraph
from tests.builders.mutants.one_layer_forms import in_one_layer
from tests.conftest import DECODER, save_tiny

DEPTH, DRAWS = 24, 8
"""Layers of a model; layers that are tried for a place, because some have no window, for example."""

GEMMA3 = {**DECODER, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8}
SIZES: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": DEPTH},
    "qwen3": {"num_hidden_layers": DEPTH},
    "gemma2": {"num_hidden_layers": DEPTH},
    "gemma3_text": {**GEMMA3, "num_hidden_layers": DEPTH},
    "gpt2": {"n_layer": DEPTH},
    "qwen3_moe": {"num_hidden_layers": DEPTH},
}
"""Families of the table, with the fields that make them deep."""

FIRST = ("prefill, 33 tokens",)
"""Scenarios that run first; a fault that they leave open runs all. What one scenario finds, all of them find, too, and
the layer is named by the weights, the nodes and the layers by themselves, which do not depend on the scenarios."""

EQUIVALENT: dict[tuple[str, str], str] = {
    (
        "gemma2",
        "mask of -10,000",
    ): "its softcap keeps scores within 50, so that 10,000 hides what any mask hides",
    (
        "gemma3_text",
        "mask of -10,000",
    ): "its norms of queries and keys keep scores below head size * weights * scale, here 6",
}
"""By family and mutant, why the mutant computes the same function."""


@dataclass(frozen=True)
class Outcome:
    """The verdict on a mutant of one layer.

    Attributes:
        name: of the mutant.
        layer: that it is in.
        verdict: of the verification.
        found: the layer that the report names.
        text: where the report says that the fault is.
    """

    name: str
    layer: int
    verdict: str
    found: int | None
    text: str

    @property
    def caught(self) -> bool:
        """Whether the verification failed."""
        return self.verdict == "fail"

    @property
    def placed(self) -> bool:
        """Whether the report names the layer of the mutant."""
        return self.caught and self.found == self.layer


def deep_model(model_type: str, folder: Path, **sizes: Any) -> Path:
    """A tiny deep model with one graph.

    Args:
        model_type: of the model.
        folder: a new folder.
        sizes: fields of the config, over those of the table.
    """
    save_tiny(model_type, folder, **{**SIZES[model_type], **sizes})
    export(folder, prefill=False, incremental=True)
    return folder


def outcomes(model_type: str, model: Path, target: Path, seed: int = 0, share: int = 1) -> Iterator[Outcome | str]:
    """The verdicts on mutants of the table; the name of a mutant that has no place in a layer.

    Args:
        model_type: of the model.
        model: its folder, with a graph.
        target: a folder for the mutants; what is in it is removed.
        seed: of the layers.
        share: one mutant in `share` is run, others of the next family, so that `share` families run all.
    """
    graph = WholeGraph.load(model / "decode.onnx")
    mine = MUTANTS[[*SIZES].index(model_type) % share :: share]
    for mutant in (one for one in mine if (model_type, one.name) not in EQUIVALENT):
        yield judged(mutant, graph, drawn_layers(graph, f"{seed} {model_type} {mutant.name}"), model, target)


def drawn_layers(graph: WholeGraph, seed: str) -> list[int]:
    """Layers at random, each at most once."""
    count = len(graph.parts.layers)
    return random.Random(seed).sample(range(count), min(DRAWS, count))


def judged(
    mutant: Mutant,
    graph: WholeGraph,
    layers: Sequence[int],
    model: Path,
    target: Path,
    method: str = "induction",
) -> Outcome | str:
    """The verdict on a mutant in the first of the layers that has a place for it; its name if none has.

    Args:
        mutant: of the table.
        graph: of the model.
        layers: numbers of layers.
        model: the folder of the model.
        target: a folder for the mutant; what is in it is removed.
        method: of the verification.
    """
    for layer in layers:
        copy_model(model, target)
        try:
            changed = in_one_layer(mutant, graph, layer, target)
        except NoPlace:
            continue
        few = () if method == "structure" else FIRST  # which runs no scenario
        found = verify_changed(changed, mutant.name, layer, model, target, method, few)
        return found if found.placed else verify_changed(changed, mutant.name, layer, model, target, method)
    return mutant.name


def copy_model(model: Path, target: Path) -> None:
    """A copy of a model's folder, whose manifest names the graph alone."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(model, target)
    (target / "llmconv.json").write_text(json.dumps({"graphs": {"decode": {"file": "decode.onnx"}}}))


def verify_changed(
    graph: onnx.ModelProto,
    name: str,
    layer: int,
    model: Path,
    target: Path,
    method: str = "induction",
    only: Sequence[str] = (),
) -> Outcome:
    """The verdict on a changed graph, which must be valid, so that none is that of a broken file.

    Args:
        graph: with a mutant in one layer.
        name: of the mutant.
        layer: number of the layer.
        model: the folder of the model.
        target: a copy of it, whose graph is replaced.
        method: of the verification.
        only: names of the scenarios; all if empty.
    """
    onnx.save(graph, target / "decode.onnx")
    require_valid(graph, layer, target)
    report = verify(target, reference=model, method=method, scenario=only, allow_changed=True, record=False)
    where = report.where
    return Outcome(name, layer, report.verdict, where.layer if where else None, where.text if where else "")


def require_valid(graph: onnx.ModelProto, layer: int, folder: Path) -> None:
    """Opens the changed layer in onnxruntime, with the parts before and after it; the whole graph if it has no layers.

    Args:
        graph: with a mutant in one layer.
        layer: number of the layer.
        folder: the folder of the weights.

    Raises:
        Exception: onnxruntime does not open it.
    """
    copy, path = onnx.ModelProto.FromString(graph.SerializeToString()), folder / "opened.onnx"
    with suppress(NotLayered):
        keep_layers(copy, {layer})
    onnx.save(copy, path)
    ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    path.unlink()
