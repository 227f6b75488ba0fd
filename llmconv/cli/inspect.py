"""`llmconv inspect`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from llmconv.cli import options
from llmconv.cli.command_group import Command
from llmconv.errors import printable
from llmconv.files.paths import is_address

if TYPE_CHECKING:
    from llmconv.convert.inspection import Inspection


@click.command(name="inspect", cls=Command)
@click.argument("path")
@options.as_json
@options.talk
def command(path: str, as_json: bool) -> None:
    """Show what PATH is: format, architecture, element types, sizes.

    PATH is a training checkpoint, a Hugging Face folder, an adapter, also a file of `onnx-adapter`, a safetensors or
    torch file, or a folder that `export` wrote, whose graphs are listed with their options and the recorded verdict of
    `verify`, and compared with the files that it judged. Of weights only headers are read, also in a bucket and on the
    Hub, and nothing is executed.
    """
    from llmconv.convert.inspection import inspect
    from llmconv.files.sources import snapshot_home

    found = inspect(path)
    is_fetched = is_address(path) or not (Path(path).exists() or snapshot_home(found.path))
    named = path if is_fetched else str(found.path)  # a download is removed by the end
    if as_json:
        options.print_json({**found.summary(), "path": named})
        return
    rows = [(title, named if title == "path" else value) for title, value in shown_rows(found)]
    width = max(len(title) for title, _ in rows)
    for title, value in rows:
        click.echo(f"{title:<{width}}  {printable(value)}")


def shown_rows(found: Inspection) -> list[tuple[str, str]]:
    names = found.config.get("architectures")
    architecture = ", ".join(map(str, names)) if isinstance(names, list) else ""
    kind = found.kind or str(found.config.get("model_type") or "unknown")
    what = [("model type", kind), ("architecture", architecture or "unknown")]
    if found.adapter:  # the fields in its config; missing fields are not shown
        titles = {"peft_type": "kind", "base": "base model", "r": "rank (r)", "modules_to_save": "saved modules"}
        fields = {n: ", ".join(map(str, one)) if isinstance(one, list) else one for n, one in found.adapter.items()}
        what = [(titles.get(name, name), str(value)) for name, value in fields.items() if value not in (None, "")]
    rows = [
        ("path", str(found.path)),
        ("format", found.format),
        *([("version", found.version)] if found.version else []),
        *([("shards", f"{found.shards:,}")] if found.shards > 1 else []),
        *what,
        *([("quantization", found.codes.line if found.codes else found.quantization)] if found.quantization else []),
        *(("graph", graph.line) for graph in found.graphs),
        *([("layouts", ", ".join(found.layouts))] if found.layouts else []),
        *([("modules", ", ".join(found.modules))] if found.modules else []),
        *(("verified", line) for line in (found.verified.lines if found.verified else [])),
        ("parameters", f"{found.parameters:,}"),
        ("tensors", f"{len(found.tensors):,}"),
        ("dtypes", ", ".join(f"{name} ({count})" for name, count in found.dtypes.items())),
        ("bytes", f"{found.nbytes:,} of weights, {found.file_bytes:,} on disk"),
    ]
    rows += [("other files", ", ".join(found.side_files))] if found.side_files else []
    rows += [("custom code", f"{', '.join(found.code)} (not executed)")] if found.code else []
    rows += [("dropped", what) for what in found.dropped]
    return rows + [("warning", warning) for warning in found.warnings]
