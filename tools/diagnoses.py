"""The cause of each FAIL of `tools/other_exporters.py`: found by hand: exporter and model to one line."""

from __future__ import annotations

from benchmarks.exporters import GENAI, MOBIUS, OPTIMUM

PORTABLE, FUSED = f"{MOBIUS}, portable", "transformers' exporter, fused"

_ROW_0 = (
    "defect: with `do_rotary` onnxruntime's CPU rotates all rows of a prompt by the positions of row 0, and the fusion "
    "feeds each row its own; right for one sequence, wrong for padded batches"
)

DIAGNOSES: dict[tuple[str, str], str] = {
    (OPTIMUM, "gemma2"): (
        "defect: the softcap of the attention scores is missing (exported through sdpa, which has none): no Tanh "
        "before any softmax; on scaled weights sigma 4,400"
    ),
    (GENAI, "mistral"): (
        "defect: sliding window missing (`local_window_size` -1): the builder asks `layer_types`, which a Mistral "
        "config lacks; genai_config.json slides nothing either"
    ),
    (MOBIUS, "gemma3_text"): (
        "defect: no `local_window_size` on any layer, and the full-attention layer reads the rotary table of the "
        "sliding ones"
    ),
    (PORTABLE, "mistral"): "defect: sliding window missing: the mask is made of `attention_mask` alone",
    (PORTABLE, "gemma3_text"): (
        "other rule: the window counts tokens, in transformers slots; differs only where padding lies between tokens"
    ),
    **{(FUSED, model): _ROW_0 for model in ("llama", "qwen3", "mistral", "gemma3_text")},
}

NO_GRAPH: dict[tuple[str, str], str] = {}
