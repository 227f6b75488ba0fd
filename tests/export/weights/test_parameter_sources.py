"""Parameters from stored tensors, by transformers' own conversion mapping."""

from __future__ import annotations

import pytest
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    Interleave,
    MergeModulelist,
    PermuteForRope,
    Transpose,
    WeightConverter,
    WeightRenaming,
)

from llmconv.errors import UnsupportedInput
from llmconv.export.weights import Concatenation, Deinterleaved, StoredRows, Transposition, element, expressions, leaves

EXPERTS = WeightConverter(
    source_patterns=["experts.*.w1.weight", "experts.*.w3.weight"],
    target_patterns="experts.gate_up_proj",
    operations=[MergeModulelist(dim=0), Concatenate(dim=1)],
)
STORED = {f"experts.{index}.{part}.weight": (6, 4) for index in range(11) for part in ("w1", "w3")}
SHAPES = {"experts.gate_up_proj": (11, 12, 4)}


def test_stacked_experts_come_from_stored_experts_in_numeric_order() -> None:
    made = expressions(SHAPES, STORED, [EXPERTS], "model")["experts.gate_up_proj"]
    assert made.shape == (11, 12, 4)
    assert [leaf.name for leaf in leaves(element(made, 10))] == ["experts.10.w1.weight", "experts.10.w3.weight"]


def test_a_tensor_with_the_name_of_a_parameter_is_that_parameter() -> None:
    made = expressions(SHAPES, {"experts.gate_up_proj": (11, 12, 4)}, [EXPERTS], "model")
    assert made == {"experts.gate_up_proj": StoredRows("experts.gate_up_proj", (11, 12, 4))}


def test_one_expert_of_a_stacked_tensor_is_a_row_of_it() -> None:
    row = element(StoredRows("experts", (4, 6, 8)), 3)
    assert isinstance(row, StoredRows)
    assert (row.label, row.shape) == ("experts[3]", (6, 8))


@pytest.mark.parametrize("prefix", ["", "model."])
def test_the_prefix_of_the_inner_model_is_optional(prefix: str) -> None:
    made = expressions({"model.norm.weight": (4,)}, {f"{prefix}norm.weight": (4,)}, [], "model")
    assert made["model.norm.weight"] == StoredRows(f"{prefix}norm.weight", (4,))


def test_a_renaming_finds_the_parameter() -> None:
    made = expressions(
        {"lm_head.weight": (9, 4)}, {"embed_out.weight": (9, 4)}, [WeightRenaming("^embed_out", "lm_head")], "m"
    )
    assert made["lm_head.weight"] == StoredRows("embed_out.weight", (9, 4))


def test_chunks_of_a_fused_tensor_are_rows_of_it() -> None:
    split = WeightConverter("qkv.weight", ["q.weight", "k.weight"], operations=[Chunk(dim=0)])
    made = expressions({"q.weight": (4, 8), "k.weight": (4, 8)}, {"qkv.weight": (8, 8)}, [split], "m")
    assert [made[name].label for name in ("q.weight", "k.weight")] == ["qkv.weight[0:4]", "qkv.weight[4:8]"]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("operation", "made"),
    [
        (Transpose(0, 1), Transposition(StoredRows("a.weight", (4, 8)), (0, 1))),
        (Interleave(dim=1), Deinterleaved(StoredRows("a.weight", (4, 8)), 1)),
        (Concatenate(dim=0), Concatenation((StoredRows("a.weight", (4, 8)),), 0)),
    ],
)
def test_an_operation_of_the_mapping_is_an_expression(operation: object, made: object) -> None:
    converter = WeightConverter("a.weight", "b.weight", operations=[operation])
    assert expressions({"b.weight": (4, 8)}, {"a.weight": (4, 8)}, [converter], "m")["b.weight"] == made


def test_an_unknown_operation_is_refused() -> None:
    converter = WeightConverter("a.weight", "b.weight", operations=[PermuteForRope()])
    with pytest.raises(UnsupportedInput, match="PermuteForRope"):
        expressions({"b.weight": (4, 8)}, {"a.weight": (4, 8)}, [converter], "m")
