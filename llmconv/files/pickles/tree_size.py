"""How large a value of a pickle is as a tree: a list of ten references to a list of ten references, and so on, is not.

Whoever walks, copies or prints a value pays for the tree. What trainers save is a tree but for a few small parts.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import chain
from typing import Any

from llmconv.files.pickles.machine import Refused, Stub

TREE, TREE_PER_PART = 1_000_000, 2
"""Parts of the tree, and so many more per part that is really there."""

DEPTH_LIMIT, OBJECT_DEPTH_LIMIT = 200, 5_000
"""Containers in containers, and in objects: code that walks them calls itself at each, as picklers do."""

CHARACTERS = 64
"""Of a text that count as one part."""

KINDS = frozenset({dict, list, tuple, set, frozenset, Stub})
COUNTED = KINDS | {str, bytes}


class _Frame:
    """A container on the way down."""

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


class _Count:
    """The walk: containers on the way down, and what is known of those that more than one other holds."""

    def __init__(self, root: Any) -> None:
        self.frames = [_Frame(root, shared=True)]
        self.known: dict[int, tuple[int, int]] = {}
        self.waiting = {id(root): 0}
        self.parts = 0

    def run(self) -> None:
        """Goes through all of it.

        Raises:
            Refused: see `check_unfolded`.
        """
        while self.frames:
            frame = self.frames[-1]
            if not any(self.add(frame, child) for child in frame.children):
                self.frames.pop()
                self.leave(frame)

    def add(self, frame: _Frame, child: Any) -> bool:
        """Counts a child; whether it has to be gone through first."""
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
        """Adds what is known of a shared child; else goes into it."""
        if known := self.known.get(id(child)):
            frame.size += known[0]
            frame.depth = max(frame.depth, known[1] + 1)
            return True
        if (place := self.waiting.get(id(child))) is not None:
            if not any(type(one.node) is Stub for one in self.frames[place:]):
                raise Refused("has a container that holds itself")
            return True
        return not self.enter(child, shared=True)

    def enter(self, child: Any, *, shared: bool) -> bool:
        """Goes into a child, whose size its container gets when it is left."""
        if shared:
            self.waiting[id(child)] = len(self.frames)
        self.frames.append(_Frame(child, shared=shared))
        if len(self.frames) > OBJECT_DEPTH_LIMIT:
            raise Refused(f"is nested deeper than {OBJECT_DEPTH_LIMIT}")
        return True

    def leave(self, frame: _Frame) -> None:
        """All children of a container are counted."""
        depth = 0 if type(frame.node) is Stub else frame.depth
        if depth > DEPTH_LIMIT:
            raise Refused(f"is nested deeper than {DEPTH_LIMIT}")
        if frame.size > TREE + TREE_PER_PART * self.parts:
            raise Refused("refers to the same parts again and again, which no checkpoint does")
        if frame.shared:
            del self.waiting[id(frame.node)]
            self.known[id(frame.node)] = frame.size, depth
        if self.frames:
            self.frames[-1].size += frame.size
            self.frames[-1].depth = max(self.frames[-1].depth, depth + 1)


class _Probe(_Count):
    """Sees how many references there are to a child that nothing but its container holds."""

    found = 0

    def add(self, frame: _Frame, child: Any) -> bool:
        """See `_Count.add`, in whose place it is called."""
        self.found = sys.getrefcount(child)
        return False


def _unshared() -> int:
    probe = _Probe([[None]])
    probe.run()
    return probe.found


_UNSHARED = _unshared()


def check_unfolded(root: Any) -> None:
    """Counts the parts of `root`, each as often as a walk from the root meets it.

    Objects that were not rebuilt may hold themselves, as objects do; no container may.

    Raises:
        Refused: there are far more of them than there are objects, or a container holds itself, or is too deep.
    """
    if type(root) in KINDS:
        _Count(root).run()
