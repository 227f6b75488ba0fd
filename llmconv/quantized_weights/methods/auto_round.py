"""AutoRound's own settings around the layouts of GPTQ and AWQ.

Layout (auto-round `export/export_to_autoround/export.py`, `inference/backend.py`): `packing_format` names it.
`auto_round:auto_gptq` is GPTQ's with zero points stored less one; `auto_round` and `auto_round:gptqmodel` are the same
with zero points as they are; `auto_round:auto_awq` is AWQ's `gemm`. `extra_config` has other bits and groups for some
modules, by name or by a pattern. Before 0.13 or so zero points of 0 were stored less one as -1, which also set the
fields above them in their word: such a model is refused.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from llmconv.checkpoint import Checkpoint
from llmconv.errors import MalformedInput, UnsupportedInput
from llmconv.quantized_weights.methods import awq, gptq
from llmconv.quantized_weights.packed_weight import GroupedWeight, part, refuse_strays, unpack
from llmconv.quantized_weights.quantized_checkpoint import QuantizationMethod
from llmconv.tensors import LazyTensor
from llmconv.timed_patterns import MatchTime, PatternProblem, compiled, finds

LESS_ONE = "auto_round:auto_gptq"
AWQ = "auto_round:auto_awq"
LAYOUTS = (LESS_ONE, AWQ, "auto_round", "auto_round:gptqmodel")
HINT = "take the model it was quantized from, or save it with AutoRound's `auto_gptq` or `auto_awq`"


def open_auto_round(checkpoint: Checkpoint) -> Mapping[str, GroupedWeight]:
    """The quantized weights; MalformedInput for mismatched parts, UnsupportedInput for other layouts or numbers."""
    config = checkpoint.config["quantization_config"]
    layout, kind = str(config.get("packing_format") or LESS_ONE), str(config.get("data_type", "int"))
    if layout not in LAYOUTS or kind != "int":
        raise UnsupportedInput(
            f"the model is quantized by AutoRound as `{kind[:40]}` in the layout `{layout[:60]}`, not supported",
            hint=f"supported: `int` in {', '.join(LAYOUTS)}; {HINT}",
        )
    stems = [name.removesuffix(gptq.WORDS) for name in checkpoint if name.endswith(gptq.WORDS)]
    own = _Settings(config.get("extra_config"), {*stems, *(name.removesuffix(".weight") for name in checkpoint)})
    weights = {f"{stem}.weight": _open(checkpoint, stem, {**config, **own.of(stem)}, layout) for stem in stems}
    refuse_strays(checkpoint, (gptq.ZEROS, gptq.SCALES, gptq.GROUPS), weights)
    return weights


def _open(tensors: Mapping[str, LazyTensor], stem: str, own: Mapping[str, Any], layout: str) -> GroupedWeight:
    if layout == AWQ:
        return awq.open_module(tensors, stem, {**own, "zero_point": not own.get("sym")})
    if layout == LESS_ONE and own.get("sym") is False:
        zeros, bits = part(tensors, stem + gptq.ZEROS, stem + gptq.WORDS), own.get("bits")
        if type(bits) is int and 0 < bits <= 8 and (unpack(zeros.read(), bits) == (1 << bits) - 1).any():
            raise UnsupportedInput(
                f"`{stem}{gptq.ZEROS}` has a zero point of 0, with which this version of AutoRound damaged others",
                hint=f"quantize the model again with a newer AutoRound, or {HINT}",
            )
    return gptq.open_module(tensors, stem, own, less_one=layout == LESS_ONE)


class _Settings:
    """The settings that some modules have of their own; modules without codes may have some, too.

    A key is the name of one of `modules`, or a pattern that is searched for in the names of those that no key names;
    the first that is found counts (`inference/utils.py`, `_expand_regex_config`).
    """

    def __init__(self, given: Any, modules: Container[str]) -> None:
        fields = given if isinstance(given, Mapping) else {}
        self._named = {name: own for name, own in fields.items() if name in modules}
        self._patterns = {name: own for name, own in fields.items() if name not in modules and own}
        self._time = MatchTime()

    def of(self, module: str) -> dict[str, Any]:
        """Its bits, group size and symmetry, as far as they are its own; MalformedInput for a pattern too slow."""
        own = self._named.get(module)
        if own is None:
            own = next((one for pattern, one in self._patterns.items() if self._is_found(pattern, module)), {})
        known = own if isinstance(own, Mapping) else {}
        return {name: known[name] for name in ("bits", "group_size", "sym") if known.get(name) is not None}

    def _is_found(self, pattern: str, module: str) -> bool:
        try:
            return finds(compiled(pattern), module, self._time)
        except PatternProblem as problem:
            raise MalformedInput(
                f"`extra_config` of the model's `quantization_config` has the pattern {pattern[:80]!r}, {problem}",
                hint="repair the `config.json`, or download it again",
            ) from problem


METHOD = QuantizationMethod("auto-round", open_auto_round)
