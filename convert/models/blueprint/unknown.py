"""Stand-in for a value that is not a weight and otherwise unknown; code that needs more of it raises Unreadable."""

from __future__ import annotations

from typing import Any, Self


class Unreadable(Exception):
    """A constructor needs more than stands here for torch and transformers."""


class Opaque:
    """Base of classes whose own base is unknown: such an object may hold weights."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass


class Unknown:
    """Anything imported or computed that has no stand-in.

    Attributes:
        name: what it is called in the source, for messages.
        is_suspect: whether it may hold weights: an object of a class that is not known.
    """

    def __init__(self, name: str, *, is_suspect: bool = False) -> None:
        self.name = name
        self.is_suspect = is_suspect

    def __getattr__(self, name: str) -> Unknown:
        if name.startswith("__"):
            raise AttributeError(name)
        return Unknown(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if "default" in kwargs:  # a field of a configuration with a validator around it
            return kwargs["default"]
        return Unknown(self.name, is_suspect=self.name[:1].isupper() and not self.name.isupper())

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (Opaque,)

    def __getitem__(self, key: Any) -> Unknown:
        return Unknown(self.name)

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def _same(self, *other: Any) -> Any:
        return Unknown(self.name)

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _same
    __pow__ = __rpow__ = __neg__ = __matmul__ = __or__ = __ror__ = __floordiv__ = __rfloordiv__ = _same
    __lt__ = __le__ = __gt__ = __ge__ = _same

    def _raise(self, *other: Any) -> Any:
        raise Unreadable(f"the value of `{self.name}` is not known")

    __bool__ = __len__ = __iter__ = __index__ = __int__ = __float__ = __contains__ = _raise
