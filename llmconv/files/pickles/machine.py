"""The stack machine of pickle, restricted to plain containers; `opcodes` implements the opcodes.

Three hooks decide what a name, a call or a reference to a storage means; the machine itself knows no name.
The cost limit grows with the size of the file: every container made or filled, every argument passed to a call and
every memoized object is counted, so that a few bytes cannot cost much memory or time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from mmap import mmap
from typing import Any

from llmconv.files.file_problem import FileProblem

NAME_LIMIT = 1_024

MEMORY, MEMORY_PER_BYTE = 48 << 20, 32
"""Limit in bytes of containers: a constant, plus this many per byte of the pickle (optimizer states need 15)."""

MEMOS, BYTES_PER_MEMO = 200_000, 3
"""Limit of memoized objects: a constant, plus one per this many bytes of the pickle."""

CONTAINERS = frozenset({tuple, list, dict, set, frozenset})
COPY_AGAIN = "the file is damaged or hostile; copy it again from where it was saved"


@dataclass(eq=False, slots=True, repr=False)
class Stub:
    """An inert record of an object that the pickle would have built.

    Attributes:
        function: the callable (a global, or another Stub), which is never called.
        args: its arguments.
        state: the argument of BUILD.
    """

    function: Any
    args: tuple[Any, ...]
    state: Any = field(default=None)

    def __repr__(self) -> str:
        """Short, because the contents may be a cyclic graph."""
        kind = type(self.function)
        return f"<{kind.__name__ if kind is Stub or kind in CONTAINERS else str(self.function)[:80]}>"


@dataclass(frozen=True)
class PickleHooks:
    """The meaning of names; each hook returns the value to push on the stack.

    Attributes:
        name: called with module and name of a global.
        call: called with a function, as `name` returned it, and its arguments.
        refer: called with a persistent id.
    """

    name: Callable[[str, str], Any]
    call: Callable[[Any, tuple[Any, ...]], Any]
    refer: Callable[[Any], Any]


class PickleMachine:
    """The state of one interpretation: stacks, memo and the position in the bytes.

    Args:
        data: the bytes.
        hooks: the meaning of names, calls and references.
        alone: the pickle must end where `data` ends.
    """

    def __init__(self, data: bytes | mmap, hooks: PickleHooks, *, alone: bool = True) -> None:
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
        """Counts `cost` bytes of memory, or work in proportion.

        Raises:
            FileProblem: the limit is exceeded.
        """
        self.spent += cost
        if self.spent > MEMORY + MEMORY_PER_BYTE * (self.position - self.skipped):
            raise FileProblem(f"would need more than {MEMORY_PER_BYTE} times its own size in memory")

    def forget(self) -> None:
        """Releases everything except the returned value."""
        self.memo.clear()
        self.stack.clear()
        self.marks.clear()

    def take(self, count: int) -> bytes:
        """The next `count` bytes."""
        end = self.position + count
        if end > len(self.data):
            raise FileProblem(f"is truncated: it ends at byte {len(self.data)}")
        chunk = self.data[self.position : end]
        self.position = end
        return chunk

    def line(self) -> str:
        """The text up to the next newline."""
        end = self.data.find(b"\n", self.position, self.position + NAME_LIMIT)
        if end < 0:
            raise FileProblem(f"has an unfinished name at byte {self.position}")
        text = self.data[self.position : end].decode()
        self.position = end + 1
        return text

    def sized(self, count: int, decode: Callable[[bytes], Any], limit: int) -> Any:
        """The value of the next `count` bytes; subclasses may leave long ones in the file.

        Args:
            count: bytes.
            decode: from bytes to the value.
            limit: maximum of `count`.
        """
        if not 0 <= count <= limit:
            raise FileProblem(f"has a value of {count} bytes at byte {self.position}, over the limit of {limit}")
        return decode(self.take(count))

    def pop_mark(self) -> list[Any]:
        """The items above the last mark."""
        items, self.stack = self.stack, self.marks.pop()
        return items

    def remember(self, index: int) -> None:
        """Memoizes the top of the stack under `index`."""
        if len(self.memo) > MEMOS and len(self.memo) > MEMOS + self.position // BYTES_PER_MEMO:
            raise FileProblem(f"memoizes more than {MEMOS} objects, too many for its size")
        self.memo[index] = self.stack[-1]
