"""Which format each weight gets."""

from __future__ import annotations

from typing import Any

import pytest

from llmconv.errors import UsageProblem
from llmconv.export.export_options import DEFAULTS
from llmconv.export.quantization.block_rounding import BlockFormat, ColumnFormat
from llmconv.export.quantization.settings import INT8, QuantizationSettings

LAYERS = 16


def settings(**options: Any) -> QuantizationSettings:
    found = QuantizationSettings.parse({**DEFAULTS, **options})
    assert found is not None
    return found


def bits(made: QuantizationSettings, name: str, layer: int | None) -> int:
    form = made.format_of(name, name, layer, LAYERS)
    return form.bits if form else 0


@pytest.mark.parametrize(
    ("preset", "inner", "head"), [("int8", 8, 8), ("int4", 4, 4), ("int4-mixed", 4, 8), ("int4-small", 4, 4)]
)
def test_a_preset_decides_the_bits_of_layers_and_head(preset: str, inner: int, head: int) -> None:
    made = settings(quant=preset)
    assert bits(made, "model.layers.3.mlp.up_proj.weight", 3) == inner
    assert bits(made, "lm_head.weight", None) == head


def test_mixed_gives_sensitive_projections_8_bits_in_some_layers() -> None:
    made = settings(quant="int4-mixed")
    down = [layer for layer in range(LAYERS) if bits(made, f"model.layers.{layer}.mlp.down_proj.weight", layer) == 8]
    assert down == [0, 1, 4, 7, 10, 13, 14, 15]
    assert bits(made, "model.layers.0.mlp.gate_proj.weight", 0) == 4
    assert bits(made, "model.layers.2.self_attn.q_proj.weight", 2) == 8


@pytest.mark.parametrize(("preset", "expected"), [("int4", 8), ("int4-small", 4), ("int4-mixed", 8), ("int8", 8)])
def test_a_head_that_is_the_embedding_keeps_8_bits(preset: str, expected: int) -> None:
    form = settings(quant=preset).format_of("embed.weight", "embed.weight", None, LAYERS, tied=True)
    assert isinstance(form, BlockFormat) and form.bits == expected


def test_codes_of_4_bits_take_factors_from_a_text_of_llmconvs_own() -> None:
    found = settings(quant="int4")
    assert (found.method, found.brief, bool(found.text)) == ("awq-columns", True, True)
    assert found.manifest_fields()["calibrate_tokens"] == 256
    assert (alone := settings(quant="int4", method="search")).text == ""
    assert found.by_weights_alone() == alone
    given = settings(quant="int4", calibrate="default")
    assert (given.method, given.brief) == ("awq-columns", False)
    assert settings(quant="int8").method == "search" and not settings(quant="a8w8").text
    with_cache = settings(quant="int4", kv_cache="int8")
    assert with_cache.text and not with_cache.brief


def test_a8w8_has_columns_but_for_the_head_and_the_last_projections_of_mlps() -> None:
    made = settings(quant="a8w8", quant_bits=["o_proj=4", "k_proj=8"])
    found = {
        name: made.format_of(f"model.layers.0.{name}.weight", f"model.layers.0.{name}.weight", 0, LAYERS)
        for name in ("mlp.up_proj", "mlp.down_proj", "self_attn.o_proj", "self_attn.k_proj")
    }
    expected = [ColumnFormat(), INT8, BlockFormat(), INT8]
    assert list(found.values()) == expected
    assert made.format_of("lm_head.weight", "lm_head.weight", None, LAYERS) == INT8


def test_names_can_be_excluded_and_get_other_bits() -> None:
    made = settings(quant="int4", quant_exclude=["o_proj"], quant_bits=["layers\\.0\\.=8", "lm_head=4"])
    names = ("model.layers.1.self_attn.o_proj.weight", "model.layers.0.mlp.up_proj.weight", "lm_head.weight")
    assert [bits(made, name, None if "head" in name else 0) for name in names] == [0, 8, 4]


def test_rtn_searches_nothing() -> None:
    assert not any(
        isinstance(form, BlockFormat) and form.search
        for form in (settings(quant="int4", method="rtn").format_of("w", "w", layer, LAYERS) for layer in (0, None))
        if form
    )


def test_8_bits_stay_symmetric_and_take_the_block_size() -> None:
    assert settings(quant="int8", quant_block=128).format_of("w", "w", 0, LAYERS) == INT8.__class__(8, 128, True, False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quant": "int3"}, "`--quant` is 'int3'"),
        ({"quant": "int4", "quant_block": 48}, "`--quant-block 48`: no operator has blocks of 48 weights"),
        ({"quant": "int4", "quant_exclude": ["("]}, "not a valid regular expression"),
        ({"quant": "int4", "quant_bits": ["head=3"]}, "`--quant-bits` is 'head=3'"),
        ({"quant": "int4", "quant_bits": ["8"]}, "`--quant-bits` is '8'"),
        ({"quant": "int4", "method": "magic"}, "`--method` is 'magic'"),
        ({"quant_block": 64}, "`--quant-block` has no effect without `--quant`"),
        ({"symmetric": True}, "`--symmetric` has no effect without `--quant`"),
        ({"method": "rtn"}, "`--method` has no effect without `--quant`"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageProblem, match=message.replace("(", r"\(")):
        QuantizationSettings.parse({**DEFAULTS, **options})


def test_without_quant_nothing_is_quantized() -> None:
    assert QuantizationSettings.parse(DEFAULTS) is None
