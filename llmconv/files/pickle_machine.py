"""The stack machine of pickle, restricted to plain containers; `opcodes` implements the opcodes.

Three hooks decide what a name, a call or a reference to a storage means; the machine itself knows no name.
The cost limit grows with the size of the file: every container made or filled, every argument passed to a call and
every memoized object is counted, so that a few bytes cannot cost much memory or time.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from mmap import mmap
from typing import Any

from llmconv.files.source_file import FileProblem

NAME_LIMIT = 1_024
# limit in bytes of containers: a constant, plus this many per byte of the pickle (optimizer states need 15)
MEMORY, MEMORY_PER_BYTE = 48 << 20, 32
MEMOS, BYTES_PER_MEMO = 200_000, 3  # limit of memoized objects: a constant, plus one per this many bytes of the pickle
CONTAINERS = frozenset({tuple, list, dict, set, frozenset})
COPY_AGAIN = "the file is damaged or hostile; copy it again from where it was saved"


@dataclass(eq=False, slots=True, repr=False)
class Stub:
    """An inert record of what a pickle would have built; `function` is never called, `state` is BUILD's argument."""

    function: Any
    args: tuple[Any, ...]
    state: Any = field(default=None)

    def __repr__(self) -> str:
        """Short, because the contents may be a cyclic graph."""
        kind = type(self.function)
        return f"<{kind.__name__ if kind is Stub or kind in CONTAINERS else str(self.function)[:80]}>"


@dataclass(frozen=True)
class PickleHooks:
    """The meaning of names; each hook returns the value to push on the stack."""

    name: Callable[[str, str], Any]  # called with module and name of a global
    call: Callable[[Any, tuple[Any, ...]], Any]  # called with a function, as `name` returned it, and its arguments
    refer: Callable[[Any], Any]  # called with a persistent id


class PickleMachine:
    """The stacks, memo and position of one interpretation; with `alone`, the pickle must end where `data` ends."""

    def __init__(self, data: bytes | mmap, hooks: PickleHooks, *, alone: bool = True) -> None:
        self.data, self.hooks, self.alone = data, hooks, alone
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.position = self.spent = self.skipped = 0

    def spend(self, cost: int) -> None:
        """Counts `cost` bytes of memory, or work in proportion; raises FileProblem if the limit is exceeded."""
        self.spent += cost
        if self.spent > MEMORY + MEMORY_PER_BYTE * (self.position - self.skipped):
            raise FileProblem(f"would need more than {MEMORY_PER_BYTE} times its own size in memory")

    def forget(self) -> None:
        """Releases everything except the returned value."""
        self.memo.clear()
        self.stack.clear()
        self.marks.clear()

    def take(self, count: int) -> bytes:
        end = self.position + count
        if end > len(self.data):
            raise FileProblem(f"is truncated: it ends at byte {len(self.data)}")
        chunk = self.data[self.position : end]
        self.position = end
        return chunk

    def line(self) -> str:
        end = self.data.find(b"\n", self.position, self.position + NAME_LIMIT)
        if end < 0:
            raise FileProblem(f"has an unfinished name at byte {self.position}")
        text = self.data[self.position : end].decode()
        self.position = end + 1
        return text

    def sized(self, count: int, decode: Callable[[bytes], Any], limit: int) -> Any:
        """The value of the next `count` bytes (at most `limit`); subclasses may leave long ones in the file."""
        if not 0 <= count <= limit:
            raise FileProblem(f"has a value of {count} bytes at byte {self.position}, over the limit of {limit}")
        return decode(self.take(count))

    def pop_mark(self) -> list[Any]:
        """The items above the last mark."""
        items, self.stack = self.stack, self.marks.pop()
        return items

    def remember(self, index: int) -> None:
        if len(self.memo) > MEMOS and len(self.memo) > MEMOS + self.position // BYTES_PER_MEMO:
            raise FileProblem(f"memoizes more than {MEMOS} objects, too many for its size")
        self.memo[index] = self.stack[-1]


OPCODE_LIMIT = 100_000_000
INT_BYTES_LIMIT = 64
STRING_LIMIT = 64 << 20
DEPTH_LIMIT = 1_000
# bytes in CPython: empty set, dict and list, a dict entry, a set item
SET, DICT, LIST, ENTRY, ITEM = 232, 80, 72, 100, 64
# cost of a call, of each item and of each character of its arguments, which it may copy or turn into a dict
CALL, ARGUMENT, CHARACTER = 100, 100, 8
# integers up to the first are their own hash; larger ones may collide, so only a few are accepted as keys
LARGEST_KEY, LARGER_KEYS = (1 << 61) - 2, 100


def run(machine: PickleMachine) -> Any:
    """The value of the pickle; FileProblem for a limit or opcode, other exceptions for inconsistent content."""
    data, operations = machine.data, OPERATIONS
    for _ in range(OPCODE_LIMIT):
        code = data[machine.position]
        machine.position += 1
        if code == STOP:
            value = machine.stack.pop()
            if machine.alone and machine.position != len(data):
                raise FileProblem(f"continues after its end at byte {machine.position}")
            return value
        operation = operations[code]
        if operation is None:
            raise FileProblem(f"uses opcode 0x{code:02x} at byte {machine.position - 1}, which checkpoints do not use")
        operation(machine)
    raise FileProblem(f"has more than {OPCODE_LIMIT} opcodes")


STOP = ord(".")
Operation = Callable[[PickleMachine], object]


def _constant(make: Callable[[], Any]) -> Operation:
    return lambda machine: machine.stack.append(make())


def _container(make: Callable[[], Any], cost: int) -> Operation:
    def operation(machine: PickleMachine) -> None:
        machine.spend(cost)
        machine.stack.append(make())

    return operation


def _number(layout: str) -> Operation:
    unpack, size = struct.Struct(layout).unpack_from, struct.calcsize(layout)

    def operation(machine: PickleMachine) -> None:
        machine.stack.append(unpack(machine.data, machine.position)[0])
        machine.position += size

    return operation


def _sized(layout: str, decode: Callable[[bytes], Any], limit: int = STRING_LIMIT) -> Operation:
    unpack, size = struct.Struct(layout).unpack_from, struct.calcsize(layout)

    def operation(machine: PickleMachine) -> None:
        (length,) = unpack(machine.data, machine.position)
        machine.position += size
        machine.stack.append(machine.sized(length, decode, limit))

    return operation


def text(data: bytes) -> str:
    """Decodes text as pickle writes it."""
    return data.decode("utf-8", "surrogatepass")


def python2_text(data: bytes) -> str:
    """A `str` of Python 2, which may hold any bytes."""
    return data.decode("latin1")


def _long(data: bytes) -> int:
    return int.from_bytes(data, "little", signed=True)


def _mark(machine: PickleMachine) -> None:
    if len(machine.marks) >= DEPTH_LIMIT:
        raise FileProblem(f"is nested deeper than {DEPTH_LIMIT}")
    machine.marks.append(machine.stack)
    machine.stack = []


def _pop(machine: PickleMachine) -> None:
    if machine.stack:
        machine.stack.pop()
    else:
        machine.pop_mark()


def _get(layout: str) -> Operation:
    unpack, size = struct.Struct(layout).unpack_from, struct.calcsize(layout)

    def operation(machine: PickleMachine) -> None:
        machine.stack.append(machine.memo[unpack(machine.data, machine.position)[0]])
        machine.position += size

    return operation


def _put(layout: str) -> Operation:
    unpack, size = struct.Struct(layout).unpack_from, struct.calcsize(layout)

    def operation(machine: PickleMachine) -> None:
        machine.remember(unpack(machine.data, machine.position)[0])
        machine.position += size

    return operation


def _tuple(size: int) -> Operation:
    def operation(machine: PickleMachine) -> None:
        stack = machine.stack
        if len(stack) < size:
            raise IndexError
        stack[-size:] = [tuple(stack[-size:])]

    return operation


def _from_mark(make: Callable[[list[Any]], Any], cost: int = 0) -> Operation:
    def operation(machine: PickleMachine) -> None:
        items = machine.pop_mark()
        machine.spend(cost)
        machine.stack.append(make(items))

    return operation


def make_dict(items: list[Any], spend: Callable[[int], object] = id) -> dict[Any, Any]:
    """A dict from alternating keys and values; `spend` counts their cost, if the caller has not."""
    made: dict[Any, Any] = {}
    _fill_dict(items, made, spend)
    return made


def _fill_dict(items: list[Any], target: Any, spend: Callable[[int], object]) -> None:
    spend(ENTRY // 2 * len(items))
    if isinstance(target, dict):
        for index in range(0, len(items), 2):
            target[_key(items[index], len(target), spend)] = items[index + 1]
    elif not isinstance(target, Stub):
        raise FileProblem("sets items of an object that is not a dict")


def _key(value: Any, others: int, spend: Callable[[int], object]) -> Any:
    """`value` as a dict key where hashing is cheap and collisions cannot be provoked; else a unique Stub.

    The hash of a tuple takes time in proportion to its length and is never cached, that of a deeply nested one
    overflows the C stack, and collisions of large integers and tuples are easy to construct (quadratic insertion).
    """
    if isinstance(value, str):
        return value
    kind: Any = type(value)
    if isinstance(value, int):
        plain = others < LARGER_KEYS or -LARGEST_KEY <= value <= LARGEST_KEY
    else:
        plain = value is None or isinstance(value, bytes | float) or kind.__hash__ is object.__hash__
    if plain:
        return value
    spend(CALL)
    return Stub("key", (value,))


def _extend(items: list[Any], target: Any) -> None:
    if isinstance(target, list):
        target.extend(items)
    elif not isinstance(target, Stub):
        raise FileProblem("appends to an object that is not a list")


def _additems(machine: PickleMachine) -> None:
    items = machine.pop_mark()
    target = machine.stack[-1]
    if isinstance(target, set):
        target.update(_keys(machine, items, len(target)))
    elif not isinstance(target, Stub):
        raise FileProblem("adds to an object that is not a set")


def _frozenset(machine: PickleMachine) -> None:
    machine.spend(SET)
    items = machine.pop_mark()
    machine.stack.append(frozenset(_keys(machine, items, 0)))


def _keys(machine: PickleMachine, items: list[Any], others: int) -> list[Any]:
    machine.spend(ITEM * len(items))
    return [_key(item, others + number, machine.spend) for number, item in enumerate(items)]


def _dict(machine: PickleMachine) -> None:
    machine.spend(DICT)
    items = machine.pop_mark()
    machine.stack.append(make_dict(items, machine.spend))


def _global(machine: PickleMachine) -> None:
    module = machine.line()
    machine.stack.append(machine.hooks.name(module, machine.line()))


def _stack_global(machine: PickleMachine) -> None:
    name, module = machine.stack.pop(), machine.stack.pop()
    if not isinstance(module, str) or not isinstance(name, str):
        raise FileProblem("names a global with something other than text")
    if len(module) > NAME_LIMIT or len(name) > NAME_LIMIT:
        raise FileProblem(f"names a global with more than {NAME_LIMIT} characters")
    machine.stack.append(machine.hooks.name(module, name))


def _inst(machine: PickleMachine) -> None:
    module = machine.line()
    function = machine.hooks.name(module, machine.line())
    items = machine.pop_mark()
    machine.spend(CALL)
    machine.stack.append(Stub(function, tuple(items)))


def _newobj(machine: PickleMachine) -> None:
    args, function = machine.stack.pop(), machine.stack.pop()
    machine.spend(CALL)
    machine.stack.append(Stub(function, _arguments(args)))


def _newobj_ex(machine: PickleMachine) -> None:
    keywords, args, function = machine.stack.pop(), machine.stack.pop(), machine.stack.pop()
    machine.spend(CALL + cost_of(args))
    machine.stack.append(Stub(function, (*_arguments(args), keywords)))


def _arguments(args: Any) -> tuple[Any, ...]:
    if not isinstance(args, tuple):
        raise FileProblem("calls something with arguments that are not a tuple")
    return args


def _build(machine: PickleMachine) -> None:
    state = machine.stack.pop()
    if isinstance(machine.stack[-1], Stub):
        machine.stack[-1].state = state


def _reduce(machine: PickleMachine) -> None:
    args, function = _arguments(machine.stack.pop()), machine.stack.pop()
    machine.spend(CALL)
    for argument in args:
        machine.spend(cost_of(argument))
    machine.stack.append(machine.hooks.call(function, args))


def cost_of(argument: Any) -> int:
    """Cost of an argument, which a call may copy."""
    kind = type(argument)
    if kind is str or kind is bytes:
        return CHARACTER * len(argument)
    return ARGUMENT * len(argument) if kind in CONTAINERS else 0


def _refer(machine: PickleMachine) -> None:
    machine.spend(CALL)
    machine.stack.append(machine.hooks.refer(machine.stack.pop()))


NAMED_OPERATIONS: dict[bytes, Operation] = {
    b"\x80": lambda machine: machine.take(1),
    b"\x95": lambda machine: machine.take(8),
    b"(": _mark,
    b"0": _pop,
    b"1": lambda machine: machine.pop_mark(),
    b"2": lambda machine: machine.stack.append(machine.stack[-1]),
    b"N": _constant(lambda: None),
    b"\x88": _constant(lambda: True),
    b"\x89": _constant(lambda: False),
    b")": _constant(tuple),
    b"]": _container(list, LIST),
    b"}": _container(dict, DICT),
    b"\x8f": _container(set, SET),
    b"K": _number("<B"),
    b"M": _number("<H"),
    b"J": _number("<i"),
    b"G": _number(">d"),
    b"\x8a": _sized("<B", _long, INT_BYTES_LIMIT),
    b"\x8b": _sized("<i", _long, INT_BYTES_LIMIT),
    b"\x8c": _sized("<B", text),
    b"X": _sized("<I", text),
    b"\x8d": _sized("<Q", text),
    b"U": _sized("<B", python2_text),
    b"T": _sized("<i", python2_text),
    b"C": _sized("<B", bytes),
    b"B": _sized("<I", bytes),
    b"\x8e": _sized("<Q", bytes),
    b"\x96": _sized("<Q", bytes),
    b"h": _get("<B"),
    b"j": _get("<I"),
    b"q": _put("<B"),
    b"r": _put("<I"),
    b"\x94": lambda machine: machine.remember(len(machine.memo)),
    b"\x85": _tuple(1),
    b"\x86": _tuple(2),
    b"\x87": _tuple(3),
    b"t": _from_mark(tuple),
    b"l": _from_mark(list, LIST),
    b"d": _dict,
    b"\x91": _frozenset,
    b"o": _from_mark(lambda items: Stub(items[0], tuple(items[1:])), CALL),
    b"s": lambda machine: _fill_dict([machine.stack.pop(-2), machine.stack.pop()], machine.stack[-1], machine.spend),
    b"u": lambda machine: _fill_dict(machine.pop_mark(), machine.stack[-1], machine.spend),
    b"a": lambda machine: _extend([machine.stack.pop()], machine.stack[-1]),
    b"e": lambda machine: _extend(machine.pop_mark(), machine.stack[-1]),
    b"\x90": _additems,
    b"c": _global,
    b"\x93": _stack_global,
    b"i": _inst,
    b"\x81": _newobj,
    b"\x92": _newobj_ex,
    b"R": _reduce,
    b"b": _build,
    b"Q": _refer,
}


OPERATIONS: tuple[Operation | None, ...] = tuple(NAMED_OPERATIONS.get(bytes([code])) for code in range(256))
