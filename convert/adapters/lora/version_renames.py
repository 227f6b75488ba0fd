"""Tensor names that differ between versions of transformers: renamed prefixes and modules (`conversion_mapping.py`)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

Rules = tuple[tuple[str, str], ...]
"""Regular expressions and replacements, applied in order."""

PREFIXES: tuple[Rules, ...] = (
    (
        (r"^language_model\.lm_head\.", "lm_head."),
        (r"^language_model\.model\.", "model.language_model."),
        (r"^(?=vision_tower\.|multi_modal_projector\.|image_newline)", "model."),
    ),
    (
        (r"^lm_head\.", "language_model.lm_head."),
        (r"^model\.language_model\.", "language_model.model."),
        (r"^model\.(?=vision_tower\.|multi_modal_projector\.|image_newline)", ""),
    ),
    (
        (r"^language_model\.lm_head\.", "lm_head."),
        (r"^language_model\.model\.", "model.language_model."),
        (r"^vision_tower\.vision_model\.", "model.vision_tower."),
        (r"^(?=multi_modal_projector\.|image_newline)", "model."),
    ),
    (
        (r"^lm_head\.", "language_model.lm_head."),
        (r"^model\.language_model\.", "language_model.model."),
        (r"^model\.vision_tower\.", "vision_tower.vision_model."),
        (r"^model\.(?=multi_modal_projector\.|image_newline)", ""),
    ),
    ((r"^model\.vision_tower\.vision_model\.", "model.vision_tower."),),
    ((r"^model\.vision_tower\.", "model.vision_tower.vision_model."),),
    ((r"^visual\.", "model.visual."), (r"^model\.(?!language_model\.|visual\.)", "model.language_model.")),
    ((r"^model\.visual\.", "visual."), (r"^model\.language_model\.", "model.")),
    ((r"^embed_out\.", "lm_head."),),
    ((r"^lm_head\.", "embed_out."),),
)
"""Old names to new and back: multimodal models like llava, whose towers lost `vision_model` in transformers 5, and like
Qwen2-VL; the head of GPT-NeoX."""

COMPONENTS: tuple[Rules, ...] = (
    ((r"\.block_sparse_moe\.", ".mlp."),),
    ((r"\.mlp\.", ".block_sparse_moe."),),
    ((r"\.block_sparse_moe\.", ".mlp."), (r"\.gate\.weight$", ".router.weight")),
    ((r"\.mlp\.", ".block_sparse_moe."), (r"\.router\.weight$", ".gate.weight")),
    (
        (r"\.experts\.gate_up_proj$", ".input_linear.weight"),
        (r"\.experts\.down_proj$", ".output_linear.weight"),
        (r"\.router\.weight$", ".router.layer.weight"),
    ),
)
"""Mixtral and MiniMax, Phi-MoE, in both directions; GraniteMoE from the names of the model to those of the files."""


def spellings(names: Sequence[str]) -> Iterator[list[str]]:
    """All spellings of `names` by one set of rules each, in the order of the names; first the names themselves."""
    for components in ((), *COMPONENTS):
        for prefixes in ((), *PREFIXES):
            yield [_replaced(name, (*components, *prefixes)) for name in names]


def _replaced(name: str, rules: Rules) -> str:
    for pattern, replacement in rules:
        name = re.sub(pattern, replacement, name)
    return name
