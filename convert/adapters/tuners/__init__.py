"""PEFT's tuners beside LoRA: one file each in `kinds/`, found by listing it; those without a merge, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NoReturn

from llmconv.convert.adapters.tuners.config_fields import AdapterFields
from llmconv.convert.adapters.tuners.module_tensors import ModuleTensors, RowChange
from llmconv.errors import UnsupportedInput
from llmconv.plugins import plugins
from llmconv.tensors import LazyTensor

WeightShape = tuple[int, int]
FittingShape = tuple[int | None, int | None]
"""out and in of the weight that an adapter's tensors are for; None where any size fits."""


def no_formula(*learned: object) -> NoReturn:
    """What a tuner has that only brings whole tensors."""
    raise NotImplementedError("a tuner with parts needs `fit` and `delta`")


@dataclass(frozen=True)
class Tuner:
    """One kind of adapter; each file of `kinds/` has one as its constant `TUNER`.

    Attributes:
        peft_type: as in `adapter_config.json`.
        parts: the names of its tensors, after the module's path; none where whole tensors are all it brings.
        fields: of its config: those that are read, and those that say only how it was trained.
        fit: the size of the weight that a module's tensors are for, from their shapes alone; refuses tensors that do
            not belong together.
        delta: the change of that weight, by rows of a matrix out×in (a convolution's is flattened to that); what
            is needed for all rows is made once, when the first are asked for.
        require: refuses tensors that do not suit a weight of this size after all.
        shared: tensors that the file has once for all modules.
        drawn: those that the file may lack, from the config and the sizes of all adapted weights.
        conv1d: whether PEFT applies it to weights that are stored in×out.
        scales_output: whether a module's bias is changed as its weight is, a matrix out×1, when `fit` says out.
    """

    peft_type: str
    parts: tuple[str, ...]
    fields: tuple[str, ...]
    fit: Callable[[ModuleTensors], FittingShape] = no_formula
    delta: Callable[[ModuleTensors, WeightShape], RowChange] = no_formula
    require: Callable[[ModuleTensors, WeightShape], None] = lambda learned, shape: None
    shared: tuple[str, ...] = ()
    drawn: Callable[[AdapterFields, Sequence[WeightShape]], Mapping[str, LazyTensor]] = lambda settings, shapes: {}
    conv1d: bool = False
    scales_output: bool = False


PROMPT = "it adds virtual tokens and changes no weight, so no merged model equals it; serve the adapter with PEFT"
MIXTURE = "the update depends on the input, so no merged model equals it; serve the adapter with PEFT"
LAYERS = "it adds layers to the model, so no merged model equals it; serve the adapter with PEFT"
UNMERGEABLE: dict[str, str] = {
    **dict.fromkeys(("PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "CPT"), PROMPT),
    **dict.fromkeys(("CARTRIDGE",), PROMPT),
    **dict.fromkeys(("XLORA", "POLY"), MIXTURE),
    **dict.fromkeys(("ADAPTION_PROMPT",), LAYERS),
}
"""`peft_type` to the way out, for adapters that no weights can express."""


@lru_cache(maxsize=1)
def tuners() -> dict[str, Tuner]:
    """Every tuner by `peft_type`."""
    return {row.peft_type: row for row in plugins(f"{__name__}.kinds", "TUNER", Tuner).values()}


def by_peft_type(kind: object) -> Tuner:
    """The tuner of an adapter's `peft_type`.

    Raises:
        UnsupportedInput: it has no merge, or is not known.
    """
    if isinstance(kind, str) and kind in tuners():
        return tuners()[kind]
    if isinstance(kind, str) and kind in UNMERGEABLE:
        raise UnsupportedInput(f"the adapter has `peft_type` {kind!r}", hint=UNMERGEABLE[kind])
    raise UnsupportedInput(
        f"the adapter has `peft_type` {kind!r}, not one of LORA, {', '.join(tuners())}",
        hint="merge it with PEFT's `merge_and_unload` and `save_pretrained`",
    )
