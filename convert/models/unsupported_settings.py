"""Refusing a model with settings that a training format cannot hold, before anything is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llmconv.checkpoint import Checkpoint
from llmconv.convert.models.model_config import LlamaLikeConfig, ModelSettings, settings_of
from llmconv.errors import UnsupportedInput, UsageProblem, listing

SHARD_LIMIT = 256
FITS_SHOWN = 12
OFF = (None, False, 0)
"""Values that switch a field off."""


def refuse_fields(decoder: LlamaLikeConfig, held: Mapping[str, tuple[Any, ...]], what: str) -> None:
    """Refuses a model with a field that is set to something that the format cannot hold.

    Args:
        decoder: the model.
        held: field to the values that the format can hold; a field that is not there or off is held by all.
        what: the format, such as `Meta's code`.

    Raises:
        UnsupportedInput: lists the fields.
    """
    odd = {
        name: decoder.fields[name]
        for name, values in held.items()
        if decoder.fields.get(name) not in OFF and decoder.fields[name] not in values
    }
    refuse(decoder.source, odd, what)


def refuse_other_values(decoder: LlamaLikeConfig, own: Mapping[str, Any], other: Mapping[str, Any], what: str) -> None:
    """Refuses a model with values other than those that the format's own code takes.

    Args:
        decoder: the model.
        own: values of the format's code by field.
        other: values of the model by field.
        what: name of the format.

    Raises:
        UnsupportedInput: lists the fields.
    """
    refuse(decoder.source, {name: value for name, value in own.items() if value != other[name]}, what)


def refuse_other_settings(checkpoint: Checkpoint, back: Mapping[str, Any], what: str) -> None:
    """Refuses a model that would come back with other settings.

    Args:
        checkpoint: the model.
        back: the `config.json` that `to-hf` will make of the written checkpoint.
        what: the format, such as `PaddleNLP`.

    Raises:
        UnsupportedInput: lists the fields.
    """
    own, other = settings_of(checkpoint), settings_of(replace(checkpoint, config=dict(back)))
    refuse(checkpoint.path.name, {name: value for name, value in own.items() if other.get(name) != value}, what)


def refuse_settings(source: str, settings: ModelSettings, held: ModelSettings, what: str) -> None:
    """Refuses a model with another setting than those in `held`.

    Args:
        source: folder name for messages.
        settings: of the model.
        held: field to the only value that the format can hold.
        what: the format, such as `PaddleNLP`.

    Raises:
        UnsupportedInput: lists the fields.
    """
    odd = {name: settings[name] for name, value in held.items() if settings.get(name, value) != value}
    refuse(source, odd, what)


def refuse(source: str, odd: ModelSettings, what: str) -> None:
    """Refuses a model for the settings `odd`, if there are any.

    Args:
        source: folder name for messages.
        odd: field to the value that cannot be held.
        what: the format, such as `PaddleNLP`.

    Raises:
        UnsupportedInput: lists the fields.
    """
    if odd:
        raise UnsupportedInput(
            f"`{source}` has what {what} cannot hold: {listing([f'{name} {value}' for name, value in odd.items()])}",
            hint="choose another `--to`, or keep the Hugging Face folder",
        )


def refuse_shards(source: str, shards: int, sizes: Mapping[str, int], copied: Mapping[str, int] | None = None) -> None:
    """Refuses a number of shards that does not divide every one of `sizes` (what it is to its number).

    Args:
        source: folder name for error messages.
        shards: how many.
        sizes: what ranks share out.
        copied: what they share out too, or where there is too little of it hold copies of.

    Raises:
        UsageProblem: lists what does not divide, and the numbers that do.
    """

    def odd(count: int) -> list[str]:
        found = [f"{name} {size}" for name, size in sizes.items() if size % count]
        return found + [f"{name} {size}" for name, size in (copied or {}).items() if size % count and count % size]

    if odd(shards):
        fits = [str(count) for count in range(1, SHARD_LIMIT + 1) if not odd(count)]
        raise UsageProblem(
            f"`{source}` does not divide among {shards} shards: {listing(odd(shards))}",
            hint=f"`--shards` may be {', '.join(fits[:FITS_SHOWN])}",
        )
