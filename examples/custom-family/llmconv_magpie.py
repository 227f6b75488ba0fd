"""The row of the family magpie: what a graph of it takes and gives."""

from __future__ import annotations

from llmconv.export import BATCH, ExtraInput, InputMap

INPUT_MAPS = {
    "magpie": InputMap(
        position_ids=False,
        extras=(ExtraInput("version", (BATCH,), values="n_versions"),),
        note="ALiBi; one key/value head; its own attention code",
    )
}
