"""The stack machine of pickle, which builds plain containers only; `opcodes` says what each opcode does to it.

What a name, a call or a reference to a storage means is decided by three hooks; the machine itself knows no name.
What a file may cost grows with its bytes: every container that it makes or fills, every argument that it passes to a
call and every object that it remembers is counted, so that no few bytes buy much memory or time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from mmap import mmap
from typing import Any

NAME_LIMIT = 1_024

MEMORY, MEMORY_PER_BYTE = 48 << 20, 32
"""Bytes of containers, and so many more per byte of the pickle: states of optimizers and tables of chunks need 15."""

MEMOS, BYTES_PER_MEMO = 200_000, 3
"""Objects to remember, and one more per so many bytes of the pickle: no writer remembers an object of one byte."""

CONTAINERS = frozenset({tuple, list, dict, set, frozenset})
COPY_AGAIN = "the file is damaged or hostile; copy it again from where it was saved"


@dataclass(eq=False, slots=True, repr=False)
class Stub:
    """An object that the pickle would have built; it was not.

    Attributes:
        function: what it would have called (a global, or another Stub).
        args: the arguments.
        state: what it would have been given by BUILD.
    """

    function: Any
    args: tuple[Any, ...]
    state: Any = field(default=None)

    def __repr__(self) -> str:
        """Short: what is inside may be a tree without end."""
        kind = type(self.function)
        return f"<{kind.__name__ if kind is Stub or kind in CONTAINERS else str(self.function)[:80]}>"


@dataclass(frozen=True)
class Hooks:
    """What names mean: `name(module, name)`, `call(function, args)`, `refer(persistent_id)`; each returns a value."""

    name: Callable[[str, str], Any]
    call: Callable[[Any, tuple[Any, ...]], Any]
    refer: Callable[[Any], Any]


class Refused(Exception):
    """A problem with the pickle, to follow the words "the pickle in X"."""

    def __init__(self, problem: str, hint: str = COPY_AGAIN) -> None:
        super().__init__(problem)
        self.hint = hint


class Machine:
    """The state of one interpretation: stacks, memo and the position in the bytes; `alone`: the bytes hold no more."""

    def __init__(self, data: bytes | mmap, hooks: Hooks, *, alone: bool = True) -> None:
        self.data = data
        self.hooks = hooks
        self.alone = alone
        self.position = 0
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.spent = 0
        self.skipped = 0

    def spend(self, cost: int) -> None:
        """Counts `cost` bytes of memory, or as much work."""
        self.spent += cost
        if self.spent > MEMORY + MEMORY_PER_BYTE * (self.position - self.skipped):
            raise Refused(f"would need more than {MEMORY_PER_BYTE} times its own size in memory")

    def forget(self) -> None:
        """Lets go of everything but the value that was returned."""
        self.memo.clear()
        self.stack.clear()
        self.marks.clear()

    def take(self, count: int) -> bytes:
        """The next `count` bytes."""
        end = self.position + count
        if end > len(self.data):
            raise Refused(f"is truncated: it ends at byte {len(self.data)}")
        chunk = self.data[self.position : end]
        self.position = end
        return chunk

    def line(self) -> str:
        """The text up to the next newline."""
        end = self.data.find(b"\n", self.position, self.position + NAME_LIMIT)
        if end < 0:
            raise Refused(f"has an unfinished name at byte {self.position}")
        text = self.data[self.position : end].decode()
        self.position = end + 1
        return text

    def sized(self, count: int, decode: Callable[[bytes], Any], limit: int) -> Any:
        """The value of the next `count` bytes; a machine over a large file may leave long ones where they are."""
        if not 0 <= count <= limit:
            raise Refused(f"has a value of {count} bytes at byte {self.position}, over the limit of {limit}")
        return decode(self.take(count))

    def pop_mark(self) -> list[Any]:
        """The items above the last mark."""
        items, self.stack = self.stack, self.marks.pop()
        return items

    def remember(self, index: int) -> None:
        """Keeps the top of the stack under `index`."""
        if len(self.memo) > MEMOS and len(self.memo) > MEMOS + self.position // BYTES_PER_MEMO:
            raise Refused(f"remembers more than {MEMOS} objects, and more than it has bytes for")
        self.memo[index] = self.stack[-1]
