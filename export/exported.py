"""Exported: the result of an export."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from llmconv.errors import InputRefused
from llmconv.output.writer import Place

if TYPE_CHECKING:  # it needs torch, which an early refusal does without
    from llmconv.export.quantization.selection import QuantizedSizes


@dataclass(frozen=True)
class ExportSizes:
    """Bytes of all graphs, of the weights that they map (each counted once), and of the weights that were written."""

    graphs: int
    mapped: int
    copied: int


@dataclass(frozen=True)
class Exported:
    """The result of an export or of its dry run.

    Attributes:
        place: the folder of the graphs, on this machine or in an object store.
        graphs: role (`prefill`, `decode`, `unified`, `embeddings`, `scoring`, `embed`, …) to file names, one per stage.
        sizes: bytes of graphs, of mapped weights and of written weights; None for a dry run.
        weight_bytes: bytes of the weights in the folder.
        weight_bytes_written: bytes of weights that the export writes: 0 if the graphs are added to the model folder.
        traced_layers: number of layers that were traced; the others were replicated.
        num_layers: number of layers of the model.
        client_files: paths of the clients' own files in the folder.
        files: bytes of the files that the export writes, by name, without the manifest; 0 for links.
        quantized: what `quant` made of the weights; None without it.
        missing: with `graphs_only`, bytes of the model's files that have to be put next to the graphs, by name.
    """

    place: Place
    graphs: dict[str, list[str]]
    sizes: ExportSizes | None
    weight_bytes: int
    weight_bytes_written: int
    traced_layers: int
    num_layers: int
    client_files: tuple[str, ...] = ()
    files: Mapping[str, int] = field(default_factory=dict)
    quantized: QuantizedSizes | None = None
    missing: Mapping[str, int] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """The folder of the graphs. Raises InputRefused: it is in an object store."""
        if isinstance(self.place, Path):
            return self.place
        raise InputRefused(f"`{self.place}` is not a folder of this machine", hint="use `place`, or copy it here first")

    @property
    def weight_bytes_mapped(self) -> int:
        """Bytes of weights that the graphs map, each counted once; for a dry run, all weights of the folder."""
        return self.sizes.mapped if self.sizes else self.weight_bytes

    def __repr__(self) -> str:
        files = ", ".join(name for names in self.graphs.values() for name in names)
        state = "a dry run" if self.sizes is None else f"{self.sizes.graphs:,} bytes"
        return f"<Exported {self.place}: {files}; {state}, {self.weight_bytes_mapped:,} bytes of weights mapped>"
