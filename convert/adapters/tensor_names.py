"""Matches tensor names of an adapter with those of the base: equal names, another spelling, or one prefix for all.

`Naming` is how the tensors of a base are called while adapters are placed. Most adapters have names that the files
have, too. Otherwise adapters are placed on the names in memory that transformers has for stored tensors
(`convert/models/meta_model.py`), and the result is renamed to the stored names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from llmconv.convert.adapters.adapter import parts_from_saved
from llmconv.errors import MalformedInput, nearest

NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
CLASSES = re.compile(r"(?:.*\.)?(?:score|classifier|qa_outputs|value_head|v_head(?:\.summary)?)(?:\.weight)?")
LISTED = 3  # number of unmatched names that an error lists


def same_name(name: str) -> str:
    """The spelling of names where nothing is known of other versions."""
    return name


def match_names(
    wanted: Collection[str], names: Collection[str], adapter: str, spelled: Callable[[str], str] = same_name
) -> dict[str, str]:
    """Each wanted name, of the model that the adapter was trained on, to the name of its tensor in the base.

    Missing names may have another spelling (`spelled`), or may all differ by one prefix, such as `transformer.` in the
    model and nothing in the file. A prefix is accepted only if it is the only one that maps every name to a different
    tensor. Raises MalformedInput, which lists similar names, for a name with no match, or with several.
    """
    found = {name: name for name in wanted if name in names}
    if not (missing := sorted(set(wanted) - set(found))):
        return found
    respelled = {name: spelled(name) for name in missing}
    spellings = [respelled] if {*respelled.values()} <= {*names} else []
    fits = _distinct(spellings, found) or prefix_fits(missing, names, found)
    # a whole model that is a part of the base, as the language model of one with images, has all of its own names
    inside = {fit for fit in fits if all(home.endswith(f".{name}") for name, home in fit)}
    fits = inside if len(inside) == 1 else fits
    if len(fits) == 1:
        return found | dict(next(iter(fits)))
    if fits:
        options = sorted(dict(fit)[missing[0]] for fit in fits)
        raise MalformedInput(
            f"`{adapter}` adapts `{missing[0]}`, which could be {_quoted(options)} of the base",
            hint="rename the adapter's tensors to the names in the base's files",
        )
    if heads := [name for name in missing if CLASSES.fullmatch(name)]:
        raise MalformedInput(
            f"`{adapter}` adapts `{heads[0]}`, a head for classes or rewards that neither the base nor the adapter has",
            hint="give the base as a model with that head, as it was before training; one that was new then is lost, "
            "unless `modules_to_save` names it or the run was saved whole",
        )
    # names without numbers of layers are enough to see another model or version
    kinds = list(dict.fromkeys(NUMBER.sub("N", name) for name in names))
    few = [kinds[index] for index in sorted({0, len(kinds) // 2, len(kinds) - 1})] if kinds else []
    raise MalformedInput(
        f"`{adapter}` adapts {len(missing)} tensors that the base does not have: {nearest(missing, names)}",
        hint=f"the base has tensors such as {', '.join(f'`{name}`' for name in few)}; give the base that the adapter "
        "names in its `base_model_name_or_path`, or rename the adapter's tensors if it is this one",
    )


def match_saved(
    saved: Collection[str],
    homes: Mapping[str, str],
    names: Collection[str],
    adapter: str,
    spelled: Callable[[str], str] = same_name,
    modules: Collection[str] = (),
) -> dict[str, str]:
    """The tensors of the base that `modules_to_save` (`modules`) replace under another name; new ones are left out.

    `saved` are names that the base does not have, `homes` the result of `match_names` for the adapter's other names.
    Raises MalformedInput for a name with an ambiguous match.
    """
    exchanges = {_differing_prefixes(*pair) for pair in homes.items() if pair[0] != pair[1]}
    result: dict[str, str] = {}
    for name in sorted(saved):
        moved = {new + name[len(old) :] for old, new in exchanges if name.startswith(old)} & set(names)
        fits = {spelled(name)} & set(names) or moved
        parts = parts_from_saved(name, modules) or 2
        close = fits or {other for other in names if has_same_end(name, other, parts)}
        if len(fits) == 1 and not fits & {*homes.values(), *result.values()}:
            result[name] = next(iter(fits))
        elif close:
            raise MalformedInput(
                f"`{adapter}` replaces `{name}`, which could be {_quoted(sorted(close))} of the base",
                hint="rename the adapter's tensors to the names in the base's files",
            )
    return result


def has_same_end(name: str, other: str, parts: int) -> bool:
    """Whether two tensor names have the same last `parts` components (see `parts_from_saved`)."""
    return name.split(".")[-parts:] == other.split(".")[-parts:]


def prefix_fits(
    missing: Sequence[str], names: Collection[str], found: Mapping[str, str]
) -> set[frozenset[tuple[str, str]]]:
    """Mappings of all missing names (sorted) to free tensors (not in `found`) that replacing one prefix gives."""
    return _distinct(_exchanges(missing, {*names}), found)


def _distinct(fits: Iterable[dict[str, str]], found: Mapping[str, str]) -> set[frozenset[tuple[str, str]]]:
    """The different mappings that give each name a tensor of its own."""
    own = (fit for fit in fits if len(set(fit.values())) == len(fit) and not set(fit.values()) & set(found))
    return {frozenset(fit.items()) for fit in own}


def _exchanges(missing: Sequence[str], names: set[str]) -> Iterator[dict[str, str]]:
    """Every mapping of all missing names by replacing one prefix; layer numbers are never part of a prefix."""
    tried: set[tuple[str, str]] = set()
    for name in names:
        old, new = _differing_prefixes(missing[0], name)
        if (
            (old, new) in tried
            or "." not in missing[0][len(old) :]  # `weight` alone would match anything
            or any(part.isdigit() for part in f"{old}{new}".split("."))
        ):
            continue
        tried.add((old, new))
        if all(item.startswith(old) and new + item[len(old) :] in names for item in missing):
            yield {item: new + item[len(old) :] for item in missing}


def _differing_prefixes(one: str, other: str) -> tuple[str, str]:
    """The parts before the longest common suffix, in whole components with their dots."""
    left, right = one.split("."), other.split(".")
    while left and right and left[-1] == right[-1]:
        left.pop()
        right.pop()
    return "".join(f"{part}." for part in left), "".join(f"{part}." for part in right)


def _quoted(names: list[str]) -> str:
    return " or ".join(f"`{name}`" for name in names[:LISTED])


@dataclass(frozen=True)
class Naming:
    """How tensors are called: `spelled(name)`; `stacks`: a tensor in memory to its experts' tensors in the base."""

    spelled: Callable[[str], str] = same_name
    stacks: Mapping[str, tuple[tuple[str, ...], ...]] = field(default_factory=dict)


AS_STORED = Naming()
