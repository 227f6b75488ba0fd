"""Extra inputs that graphs leave out, because what runs the graphs cannot feed them; they keep their default."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from llmconv.errors import UnsupportedInput
from llmconv.export.clients import DEFAULT, Client
from llmconv.export.graph_spec import GROWING, GraphSpec
from llmconv.progress import say
from llmconv.runtime.extra_inputs import SEQUENCE, TOTAL, ExtraInput


def all_fixed(extras: Mapping[str, ExtraInput], what: str, without: str) -> tuple[str, ...]:
    """The names of all extra inputs, for graphs that take none of them.

    A message says that `what` cannot feed them, and to leave out the option `without`.

    Raises:
        UnsupportedInput: an input has no constant default.
    """
    for name, extra in extras.items():
        if callable(extra.default):
            raise UnsupportedInput(
                f"{what} cannot feed the input `{name}`, which has another value in each call",
                hint=f"leave out `{without}`",
            )
    return tuple(extras)


def with_fixed_inputs(
    specs: Mapping[str, GraphSpec], extras: Mapping[str, ExtraInput], clients: Sequence[Client]
) -> dict[str, GraphSpec]:
    """The specs, by role, that all clients can feed; UnsupportedInput for an input without a constant default."""
    if any(spec.cache != GROWING.cache for spec in specs.values()):
        _require_parts(extras)
    others = [client.name for client in clients if client.name != DEFAULT]
    if not extras or not others:
        return dict(specs)
    fixed = all_fixed(extras, f"layout `{others[0]}`", f"--layout {others[0]}")
    for name in fixed:
        say(f"`{name}` is always {extras[name].default}: layout `{others[0]}` does not feed it")
    return {role: replace(spec, fixed_inputs=fixed) for role, spec in specs.items()}


def _require_parts(extras: Mapping[str, ExtraInput]) -> None:
    """Refuses inputs of a whole call: graphs with a cache of fixed length run a prompt in several calls."""
    for name, extra in extras.items():
        if SEQUENCE not in extra.axes and (TOTAL in extra.axes or callable(extra.default)):
            raise UnsupportedInput(
                f"a cache of fixed length runs prompts in parts, and the input `{name}` has another value in each part",
                hint="leave out `--shapes static` and `--cache shared-buffer`",
            )


def refuse_option(extras: Mapping[str, ExtraInput], option: str) -> None:
    """Raises UnsupportedInput if the model has extra inputs, whose graphs do not have this option."""
    if extras:
        raise UnsupportedInput(
            f"`{option}` does not support the input `{next(iter(extras))}` of this family",
            hint=f"leave out `{option}`, or the input in its row of the input map",
        )
