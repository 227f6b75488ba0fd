"""Checks the arguments of public functions against their annotations before anything else runs.

A value of the wrong type would otherwise fail deep inside, or be misinterpreted: a str is a sequence of characters, and
`"false"` is true. A single value where a sequence is expected becomes a sequence of one.
"""

from __future__ import annotations

import inspect
import operator
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import cache, wraps
from numbers import Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, NoReturn, ParamSpec, TypeVar, Union, Unpack, get_args, get_origin, get_type_hints

from llmconv.errors import LlmconvError, UsageProblem
from llmconv.files.paths import PLACED, WRITTEN, kind_of, output_path, output_place, path_of

OWN = "checked by the function itself"  # in `Annotated`: a parameter that is not checked here
# short names of element types, as other tools spell them
ELEMENT_TYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
TYPED = {"dtype", "precision", "logits_dtype"}  # parameters that are the name of an element type
P = ParamSpec("P")
R = TypeVar("R")


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: checks and converts arguments by their annotations, or raises UsageProblem.

    Supported are `bool`, `int`, `float`, `str`, paths, classes, unions and sequences of these; numpy numbers become
    Python numbers, an iterator becomes a tuple, and an output (`paths.Written`) becomes a local path.
    """
    signature = inspect.signature(function)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        hints = _hints(function)
        # raises UsageProblem for a name that is not a parameter
        known = _known(signature, hints)
        unknown = sorted(kwargs.keys() - known) if known is not None else []
        if unknown:
            near = get_close_matches(unknown[0], sorted(known or ()), n=1, cutoff=0.5)
            hint = f"is `{near[0]}` meant?" if near else f"it has {', '.join(sorted(known or ()))}"
            raise UsageProblem(f"`{function.__name__}` has no parameter `{unknown[0]}`", hint=hint)
        bound = signature.bind(*args, **kwargs)
        for name, value in bound.arguments.items():
            if signature.parameters[name].kind is not inspect.Parameter.VAR_KEYWORD:
                bound.arguments[name] = fitted(value, hints.get(name, Any), name)
            elif get_origin(hints[name]) is Unpack:
                fields = _of_options(get_args(hints[name])[0])
                bound.arguments[name] = {key: fitted(one, fields.get(key, Any), key) for key, one in value.items()}
        try:
            return function(*bound.args, **bound.kwargs)
        except LlmconvError as error:  # a traceback shows the notes; the outermost function's names are the user's
            if hint := in_python(error.hint, {**dict.fromkeys(known or ()), **_fields(signature, hints)}):
                error.__notes__ = [f"hint: {hint}"]
            raise

    return call


def _known(signature: inspect.Signature, hints: Mapping[str, Any]) -> set[str] | None:
    """The names of all parameters and options; None if any name is accepted."""
    known: set[str] = set()
    for name, parameter in signature.parameters.items():
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD:
            known.add(name)
        elif get_origin(hints.get(name)) is Unpack:
            known |= _of_options(get_args(hints[name])[0]).keys()
        else:
            return None
    return known


def _fields(signature: inspect.Signature, hints: Mapping[str, Any]) -> dict[str, Any]:
    """The annotations of all parameters and options."""
    options = [get_args(hint)[0] for hint in hints.values() if get_origin(hint) is Unpack]
    found = {name: hints[name] for name in signature.parameters if name in hints}
    return found | {name: hint for kind in options for name, hint in _of_options(kind).items()}


SPELLED = {"o": "output", "from": "format", "stop": "stop_strings", "density": "densities", "export": "first_export"}
# options whose parameter has another name; of those that may be repeated it is the plural
OPTION = re.compile(r"(?<![\w-])--?([a-z][a-z-]*)(?:[ =]([^\s`]+))?")


def in_python(hint: str, parameters: Mapping[str, Any]) -> str:
    """A hint with parameters in place of the options between backticks: `dtype="float16"` for `--dtype float16`.

    `parameters` are those of the function that was called, with their annotations. Options that it does not have stay
    as they are, and so does a whole command.
    """

    def named(found: re.Match[str]) -> str:
        option, value = found[1].replace("-", "_"), found[2]
        own = next((one for one in (option, f"{option}s", SPELLED.get(option)) if one in parameters), None)
        if own is None and option.startswith("no_") and option[3:] in parameters:
            return f"{option[3:]}=False" + (f" {value}" if value else "")
        if own is None:
            return found[0]
        if value is None:
            return f"{own}=True" if parameters[own] is bool else own
        is_plain = value.isupper() or re.fullmatch(r"-?[\d.]+|…", value)
        return f"{own}={value}" if is_plain else f'{own}="{value}"'

    def spoken(found: re.Match[str]) -> str:
        is_option = found[0].startswith(("`--", "`-o"))
        return re.sub(r" (?=\w+=)", ", ", OPTION.sub(named, found[0])) if is_option else found[0]

    return re.sub(r"`[^`]+`", spoken, hint)


@cache
def _of_options(kind: Any) -> dict[str, Any]:
    """The annotations of a TypedDict of options by name."""
    return get_type_hints(kind, include_extras=True)


@cache
def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    return get_type_hints(function, include_extras=True)


def fitted(value: Any, hint: Any, name: str) -> Any:
    """`value` as the resolved annotation `hint` wants it; UsageProblem or InputRefused names it `name`."""
    origin, options = get_origin(hint), get_args(hint)
    if name in TYPED and isinstance(value, str):
        value = ELEMENT_TYPES.get(value, value)
    if hint is Any or isinstance(hint, TypeVar):
        return value
    if origin is Annotated:
        if OWN in options:
            return value
        if PLACED in options:
            return output_place(value, name)
        return output_path(value, name) if WRITTEN in options else fitted(value, options[0], name)
    if origin in (Union, UnionType):
        return _one_of(value, options, name)
    if origin is not None and issubclass(origin, Sequence):
        return _several(value, options[0], name)
    if hint in PLAIN:
        return PLAIN[hint](value, name)
    kind = origin or hint
    fits = callable(value) if kind is Callable else isinstance(value, kind)
    return value if fits else _refuse(value, name, f"a `{getattr(kind, '__name__', kind)}`")


def _one_of(value: Any, options: Sequence[Any], name: str) -> Any:
    """The value, converted by the first of several annotations that accepts it."""
    if value is None and NoneType in options:
        return None
    if Path in options and isinstance(value, str | os.PathLike):
        path_of(value, name)  # returned unchanged: pathlib would drop a slash of a URI
        return value
    problems = []
    for option in options:
        if option is NoneType:
            continue
        try:
            return fitted(value, option, name)
        except UsageProblem as problem:
            problems.append(problem)
    if Path in options:
        path_of(value, name)  # raises: `value` is not a path
    classes = [option for option in options if isinstance(option, type) and option not in (*PLAIN, NoneType)]
    if len(classes) == len(problems) > 1:
        *first, last = (f"`{each.__name__}`" for each in classes)
        _refuse(value, name, f"a {', '.join(first)} or {last}")
    raise problems[-1]


def _several(value: Any, option: Any, name: str) -> tuple[Any, ...]:
    """A tuple of the items of an iterable, or of a single value."""
    if isinstance(value, set | frozenset):
        _refuse(value, name, "a list (a set has no order)")
    if isinstance(value, str | bytes | os.PathLike | Mapping) or not isinstance(value, Iterable):
        return (fitted(value, option, name),)
    return tuple(fitted(one, option, f"{name}[{at}]") for at, one in enumerate(value))


def _refuse(value: Any, name: str, wanted: str) -> NoReturn:
    shown = f" ({value!r:.40})" if isinstance(value, str | int | float) and not isinstance(value, bool) else ""
    raise UsageProblem(f"`{name}` is {kind_of(value)}{shown}, not {wanted}", hint=f"give {wanted}")


def _bool(value: Any, name: str) -> bool:
    if isinstance(value, bool) or type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_"):
        return bool(value)
    _refuse(value, name, "True or False")


def _int(value: Any, name: str) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        _refuse(value, name, "an integer")


def _float(value: Any, name: str) -> float:
    if isinstance(value, Real) and not isinstance(value, bool):
        return float(value)
    _refuse(value, name, "a number")


def _str(value: Any, name: str) -> str:
    return str(value) if isinstance(value, str) else _refuse(value, name, "a string")


# type to its conversion, which raises UsageProblem
PLAIN: dict[Any, Callable[[Any, str], Any]] = {bool: _bool, int: _int, float: _float, str: _str, Path: path_of}


def require_choice(value: str, choices: Sequence[str], name: str) -> None:
    """Raises UsageProblem unless `value` is one of `choices`; `name` is the parameter in the message."""
    if value not in choices:
        raise UsageProblem(f"`{name}` is {value!r}", hint=f"give one of: {', '.join(choices)}")


def require_least(value: int, least: int, name: str) -> int:
    """Returns `value`; raises UsageProblem if it is less than `least`."""
    if value < least:
        raise UsageProblem(f"`{name}` is {value}", hint=f"give at least {least}")
    return value


MOST_THREADS = 1024  # of one computation; runtimes start any number, which takes hours and all memory


def require_threads(threads: int) -> int:
    """Returns the number of threads; raises UsageProblem if it is negative, or more than any machine has use for."""
    if not 0 <= threads <= MOST_THREADS:
        raise UsageProblem(f"`threads` is {threads}", hint=f"give 0 for one per core, or up to {MOST_THREADS}")
    return threads
