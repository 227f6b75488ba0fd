"""Limits the size of a pickled value as a tree: lists of ten references to lists of ten references grow exponentially.

Code that walks, copies or prints a value pays for the tree. The values that trainers save share only small parts.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import chain
from typing import Any

from llmconv.files.file_problem import FileProblem
from llmconv.files.pickles.machine import Stub

TREE, TREE_PER_PART = 1_000_000, 2
"""Limit of parts in the tree: a constant, plus this many per part in memory."""

DEPTH_LIMIT, OBJECT_DEPTH_LIMIT = 200, 5_000
"""Nesting of containers, and of objects: code that walks them is recursive."""

CHARACTERS = 64
"""Characters of a text that count as one part."""

KINDS = frozenset({dict, list, tuple, set, frozenset, Stub})
COUNTED = KINDS | {str, bytes}


class _Frame:
    """A container on the current path from the root."""

    __slots__ = ("children", "depth", "node", "shared", "size")

    def __init__(self, node: Any, *, shared: bool) -> None:
        self.node = node
        self.shared = shared
        self.children = _children(node)
        self.size = self.depth = 1


def _children(node: Any) -> Iterator[Any]:
    if isinstance(node, dict):
        return chain(node, node.values())
    return iter((node.function, node.args, node.state)) if isinstance(node, Stub) else iter(node)


class _TreeWalk:
    """The walk: containers on the current path, and the sizes of shared containers."""

    def __init__(self, root: Any) -> None:
        self.frames = [_Frame(root, shared=True)]
        self.known: dict[int, tuple[int, int]] = {}
        self.waiting = {id(root): 0}
        self.parts = 0

    def run(self) -> None:
        """Walks the whole value.

        Raises:
            FileProblem: see `check_unfolded`.
        """
        while self.frames:
            frame = self.frames[-1]
            if not any(self.add(frame, child) for child in frame.children):
                self.frames.pop()
                self.leave(frame)

    def add(self, frame: _Frame, child: Any) -> bool:
        """Counts a child; returns whether it has to be walked first."""
        kind = type(child)
        self.parts += 1
        frame.size += 1
        if kind is str or kind is bytes:
            if len(child) >= CHARACTERS:
                frame.size += len(child) // CHARACTERS
                self.parts += 0 if id(child) in self.known else len(child) // CHARACTERS
                self.known[id(child)] = 0, 0
            return False
        if kind not in KINDS or (kind is not Stub and not child):
            return False
        shared = sys.getrefcount(child) > _UNSHARED
        if not shared and (kind is tuple or kind is list) and COUNTED.isdisjoint(map(type, child)):
            self.parts += len(child)
            frame.size += len(child)
            frame.depth = max(frame.depth, 2)
            return False
        return not self.is_known(frame, child) if shared else self.enter(child, shared=False)

    def is_known(self, frame: _Frame, child: Any) -> bool:
        """Adds the known size of a shared child; else enters it."""
        if known := self.known.get(id(child)):
            frame.size += known[0]
            frame.depth = max(frame.depth, known[1] + 1)
            return True
        if (place := self.waiting.get(id(child))) is not None:
            if not any(type(one.node) is Stub for one in self.frames[place:]):
                raise FileProblem("has a container that contains itself")
            return True
        return not self.enter(child, shared=True)

    def enter(self, child: Any, *, shared: bool) -> bool:
        """Starts walking a child; its container is charged in `leave`."""
        if shared:
            self.waiting[id(child)] = len(self.frames)
        self.frames.append(_Frame(child, shared=shared))
        if len(self.frames) > OBJECT_DEPTH_LIMIT:
            raise FileProblem(f"is nested deeper than {OBJECT_DEPTH_LIMIT}")
        return True

    def leave(self, frame: _Frame) -> None:
        """Charges a container, all of whose children are counted, to its own container."""
        depth = 0 if type(frame.node) is Stub else frame.depth
        if depth > DEPTH_LIMIT:
            raise FileProblem(f"is nested deeper than {DEPTH_LIMIT}")
        if frame.size > TREE + TREE_PER_PART * self.parts:
            raise FileProblem("refers to the same parts again and again, which checkpoints do not")
        if frame.shared:
            del self.waiting[id(frame.node)]
            self.known[id(frame.node)] = frame.size, depth
        if self.frames:
            self.frames[-1].size += frame.size
            self.frames[-1].depth = max(self.frames[-1].depth, depth + 1)


class _ReferenceProbe(_TreeWalk):
    """Measures the reference count of a child that only its container refers to."""

    found = 0

    def add(self, frame: _Frame, child: Any) -> bool:
        """Overrides `_TreeWalk.add`."""
        self.found = sys.getrefcount(child)
        return False


def _unshared() -> int:
    probe = _ReferenceProbe([[None]])
    probe.run()
    return probe.found


_UNSHARED = _unshared()


def check_unfolded(root: Any) -> None:
    """Counts the parts of `root`, each as often as a walk from the root reaches it.

    Stubs may contain themselves, as objects do; containers may not.

    Raises:
        FileProblem: the tree is far larger than the value in memory, too deep, or a container contains itself.
    """
    if type(root) in KINDS:
        _TreeWalk(root).run()
