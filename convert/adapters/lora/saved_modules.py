"""Whole tensors in an adapter's file: those that training made, and the base's own that PEFT saved beside them.

With `save_embedding_layers`, which it sets by itself for a resized vocabulary, PEFT (`get_peft_model_state_dict`)
writes the embedding and the head as they lie in its wrappers: `.base_layer.weight` below LoRA's factors,
`.token_adapter.base_layer.weight` below trained rows, and for `modules_to_save` the same tensor as `.weight` and as
`.modules_to_save.weight`, with `.original_module.weight` for the one before training.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from llmconv.convert.algebra.operations import equal
from llmconv.convert.models.blueprint.names import EMBEDDINGS, HEADS
from llmconv.errors import MalformedInput
from llmconv.tensors import BY_NAME, FLOATS, LazyTensor, cast

ORIGINAL = re.compile(r"\.(?:original_module|(?:token_adapter\.)?base_layer)(?=\.\w+$)")
TRAINED = re.compile(r"\.(?:modules_to_save|ln_tuning_layers)(?:\.\w+)?(?=\.\w+$)")
FLOAT32 = BY_NAME["float32"]


@dataclass(frozen=True)
class WholeTensors:
    """The whole tensors of a file, by the names that they have in the model.

    Attributes:
        trained: those that training made.
        originals: those of the base, as they were before.
    """

    trained: dict[str, LazyTensor] = field(default_factory=dict)
    originals: dict[str, LazyTensor] = field(default_factory=dict)

    def place(self, plain: str) -> tuple[dict[str, LazyTensor], str]:
        """Where a tensor of this name goes, and under which key."""
        if ORIGINAL.search(plain):
            return self.originals, ORIGINAL.sub("", plain)
        return self.trained, TRAINED.sub("", plain)

    def all(self) -> dict[str, LazyTensor]:
        """What takes the place of the base's tensors."""
        return self.originals | self.trained

    def untrained(self, saved: Collection[str]) -> dict[str, LazyTensor]:
        """Those of the base: an embedding or a head that is no saved module was saved because it was resized."""
        ends = (*EMBEDDINGS, *HEADS)
        more = {
            name: tensor
            for name, tensor in self.trained.items()
            if name.endswith(ends) and not is_saved(name, saved) and name not in self.originals
        }
        return self.originals | more


def is_saved(name: str, modules: Collection[str]) -> bool:
    """Whether the tensor is of one of the `modules_to_save`, which PEFT looks for at the end of a module's path."""
    return name.rpartition(".")[0].endswith(tuple(modules))


def place_once(place: dict[str, LazyTensor], key: str, tensor: LazyTensor, named: str, *, may_repeat: bool) -> None:
    """Puts a tensor in its place.

    Args:
        place: where to place_once it.
        key: under which key.
        tensor: the tensor.
        named: file and name of the tensor, for messages.
        may_repeat: the same tensor may be there already.

    Raises:
        MalformedInput: a tensor is there.
    """
    if key in place and not (may_repeat and equal(place[key], tensor)):
        raise MalformedInput(
            f"{named} twice, under different names",
            hint="several adapters are in one file; save each in its own folder",
        )
    place[key] = tensor


def same_values(one: LazyTensor, other: LazyTensor) -> bool:
    """Whether two tensors hold the same numbers, whatever floating-point type they are stored in."""
    if one.shape != other.shape:
        return False
    wide = all(tensor.dtype.name in FLOATS for tensor in (one, other))
    return equal(cast(one, FLOAT32), cast(other, FLOAT32)) if wide else equal(one, other)


def changed_originals(originals: Mapping[str, LazyTensor], base: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """The originals that are not what the base has itself."""
    return {
        name: tensor for name, tensor in originals.items() if not (name in base and same_values(tensor, base[name]))
    }
