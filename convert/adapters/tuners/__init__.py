"""PEFT's tuners other than LoRA: one file each in `kinds/`, found by listing the folder; unmergeable ones by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NoReturn

from llmconv.convert.adapters.tuners.module_tensors import AdapterFields, ModuleTensors, RowChange
from llmconv.errors import UnsupportedInput
from llmconv.plugins import plugins
from llmconv.tensors import LazyTensor

WeightShape = tuple[int, int]
FittingShape = tuple[int | None, int | None]
"""out and in of the weight that an adapter's tensors fit; None for any size."""


def no_formula(*learned: object) -> NoReturn:
    """`fit` and `delta` of a tuner that only has whole tensors."""
    raise NotImplementedError("a tuner with parts needs `fit` and `delta`")


@dataclass(frozen=True)
class Tuner:
    """One kind of adapter; each file of `kinds/` has one as its constant `TUNER`."""

    peft_type: str  # as in `adapter_config.json`
    parts: tuple[str, ...]  # names of its tensors, after the module's path; empty if it only has whole tensors
    # known fields of its config: those that are read, and those that only describe the training
    fields: tuple[str, ...]
    # `fit(learned)` returns the size of the weight from the shapes alone; refuses a shape mismatch
    fit: Callable[[ModuleTensors], FittingShape] = no_formula
    # `delta(learned, shape)` returns a function from rows of the weight to rows of its update, as a matrix out×in
    # (convolutions are flattened); values needed for all rows are computed once, in `delta`
    delta: Callable[[ModuleTensors, WeightShape], RowChange] = no_formula
    # `require(learned, shape)` refuses tensors that do not fit a weight of this size
    require: Callable[[ModuleTensors, WeightShape], None] = lambda learned, shape: None
    shared: tuple[str, ...] = ()  # names of tensors that the file has once for all modules
    # `drawn(fields, shapes)` returns the shared tensors that the file may lack, from the config and the sizes of all
    # adapted weights
    drawn: Callable[[AdapterFields, Sequence[WeightShape]], Mapping[str, LazyTensor]] = lambda settings, shapes: {}
    conv1d: bool = False  # PEFT supports weights that are stored in×out
    # the bias of a module is updated like its weight, as a matrix out×1, if `fit` returns out
    scales_output: bool = False


VIRTUAL = "it adds virtual tokens and changes no weight, so no merged model equals it"
PROMPT = f"{VIRTUAL}; serve the adapter with PEFT"
PREFIX = f"{VIRTUAL}: `llmconv generate MODEL --prefix-tuning ADAPTER`, or `llmconv export MODEL --prefix ADAPTER`"
MIXTURE = "the update depends on the input, so no merged model equals it; serve the adapter with PEFT"
LAYERS = "it adds layers to the model, so no merged model equals it; serve the adapter with PEFT"
UNMERGEABLE: dict[str, str] = {
    **dict.fromkeys(("PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING"), PREFIX),
    **dict.fromkeys(("MULTITASK_PROMPT_TUNING", "CPT", "CARTRIDGE"), PROMPT),
    **dict.fromkeys(("XLORA", "POLY"), MIXTURE),
    **dict.fromkeys(("ADAPTION_PROMPT",), LAYERS),
}
"""`peft_type` to the way out, for adapters that no merged weights equal."""


@lru_cache(maxsize=1)
def tuners() -> dict[str, Tuner]:
    """Every tuner by `peft_type`."""
    return {row.peft_type: row for row in plugins(f"{__name__}.kinds", "TUNER", Tuner).values()}


def by_peft_type(kind: object) -> Tuner:
    """The tuner of an adapter's `peft_type`; UnsupportedInput if it cannot be merged or is unknown."""
    if isinstance(kind, str) and kind in tuners():
        return tuners()[kind]
    if isinstance(kind, str) and kind in UNMERGEABLE:
        raise UnsupportedInput(f"the adapter has `peft_type` {kind!r}", hint=UNMERGEABLE[kind])
    raise UnsupportedInput(
        f"the adapter has `peft_type` {kind!r}, not one of LORA, {', '.join(tuners())}",
        hint="merge it with PEFT's `merge_and_unload` and `save_pretrained`",
    )
