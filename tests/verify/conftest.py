"""Exports of the tiny models, made once, and folders in which one graph may be broken."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest

from llmconv.export.exporter import export
from llmconv.verify import Report, verify
from llmconv.verify.reference.eager import Eager
from tests.builders.mutants.mutants import Mutant
from tests.builders.prefix_models import save_adapter
from tests.builders.quantizers import QUANTIZERS, quantizable, save_tokenizer
from tests.builders.tracing import trace_once
from tests.conftest import save_tiny

trace_once()

Tiny = Callable[[str], Path]


@pytest.fixture(scope="session")
def exported(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """`exported(model_type)` is a folder with weights, prefill.onnx and decode.onnx; do not write into it."""
    folders: dict[str, Path] = {}

    def folder(model_type: str) -> Path:
        if model_type not in folders:
            target = tmp_path_factory.mktemp("exported") / model_type
            shutil.copytree(tiny(model_type), target)
            export(target, prefill=True, incremental=True, overwrite=True)
            folders[model_type] = target
        return folders[model_type]

    return folder


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 of more than 64 MiB with activations as large as those of trained models, and two graphs."""
    import torch  # noqa: PLC0415 - only the tests that ask for a model pay for it
    from safetensors.torch import load_file, save_file  # noqa: PLC0415

    folder = tmp_path_factory.mktemp("trained") / "qwen3"
    save_tiny("qwen3", folder, vocab_size=140_000, hidden_size=128, num_hidden_layers=2, tie_word_embeddings=True)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.embed_tokens.weight"] *= 200
    save_file({name: tensor.to(torch.float32) for name, tensor in tensors.items()}, path, {"format": "pt"})
    export(folder, prefill=True, incremental=True)
    assert path.stat().st_size > 64 << 20
    return folder


@pytest.fixture(scope="session")
def optioned(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`optioned(model_type, last_logits=True, …)` is a folder exported with options; do not write into it.

    `prefix` is the kind of an adapter, see `save_adapter`.
    """
    folders: dict[tuple[object, ...], Path] = {}

    def folder(model_type: str, **options: Any) -> Path:
        key = (model_type, *sorted(options.items()))
        if key not in folders:
            target = tmp_path_factory.mktemp("optioned") / model_type
            shutil.copytree(tiny(model_type), target)
            if "prefix" in options:
                options["prefix"] = save_adapter(target, target.parent / "adapter", options["prefix"])
            export(target, prefill=True, incremental=True, **options)
            folders[key] = target
        return folders[key]

    return folder


@pytest.fixture(scope="session")
def eager(exported: Tiny) -> Callable[[str], Eager]:
    """`eager(model_type)` is the reference of the tiny model; it computes every scenario once."""
    references: dict[str, Eager] = {}

    def reference(model_type: str) -> Eager:
        if model_type not in references:
            references[model_type] = Eager(exported(model_type), "float32", keep=True)
        return references[model_type]

    return reference


@pytest.fixture
def broken(exported: Tiny, tmp_path: Path) -> Callable[[str, Mutant], Path]:
    """`broken(model_type, mutant)` is a folder with that mutant as its decode graph."""

    def folder(model_type: str, mutant: Mutant) -> Path:
        target = decode_only(exported(model_type), tmp_path / "mutant")
        model = onnx.load(target / "decode.onnx", load_external_data=False)
        assert mutant.apply(model, target), "the graph has no place for this mutant"
        onnx.save(model, target / "decode.onnx")
        return target

    return folder


def decode_only(folder: Path, target: Path) -> Path:
    """A copy of an exported folder that holds the decode graph only."""
    shutil.copytree(folder, target)
    (target / "prefill.onnx").unlink(missing_ok=True)
    (target / "llmconv.json").write_text(json.dumps({"graphs": {"decode": {"file": "decode.onnx"}}}))
    return target


@pytest.fixture(scope="session")
def clean_report(exported: Tiny, eager: Callable[[str], Eager]) -> Report:
    """The report of the tiny llama."""
    return verify(exported("llama"), eager=eager("llama"))


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """`small(model_type)` is a folder of two layers with a tokenizer and one graph; do not write into it."""
    folders: dict[str, Path] = {}

    def folder(model_type: str) -> Path:
        if model_type not in folders:
            target = tmp_path_factory.mktemp("small") / model_type
            save_tiny(model_type, target, **{"n_layer" if model_type == "gpt2" else "num_hidden_layers": 2})
            export(target, unified=True)
            save_tokenizer(target)
            folders[model_type] = target
        return folders[model_type]

    return folder


@pytest.fixture(scope="session")
def quantized(small: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """`quantized(model_type, quantizer)` is the graph of `small` after one of `QUANTIZERS`; do not write to it."""
    graphs: dict[tuple[str, str], Path] = {}

    def graph(model_type: str, quantizer: str) -> Path:
        key = (model_type, quantizer)
        if key not in graphs:
            place = tmp_path_factory.mktemp("quantized")
            plain = quantizable(small(model_type) / "model.onnx", place / "plain.onnx")
            graphs[key] = QUANTIZERS[quantizer](plain, place / f"{model_type}.onnx")
        return graphs[key]

    return graph
