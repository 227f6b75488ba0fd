"""What an answer consists of: content, reasoning and calls of tools, taken apart while it grows.

A call that is cut off, does not parse, or names no tool of the request stays content, see `tool_dialects.py`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from llmconv.serve.argument_values import NotACall, loaded
from llmconv.serve.tool_dialects import (
    CALL,
    CONTENT,
    REASONING,
    Dialect,
    Part,
    Schemas,
    Thoughts,
    call_of,
)


class AnswerParser(Protocol):
    """Takes an answer apart while it grows."""

    def push(self, text: str) -> list[Part]:
        """The parts that `text` completes."""

    def close(self) -> list[Part]:
        """What was held back, at the end of the answer."""


@dataclass
class TextParser:
    """The parser of all dialects whose marks are in the text.

    `opened` says that the prompt has begun the reasoning; `thoughts` and `dialect` are None where an answer has none.
    White space around reasoning and calls is left out.
    """

    thoughts: Thoughts | None = None
    dialect: Dialect | None = None
    tools: Schemas = field(default_factory=dict)
    opened: bool = False

    def __post_init__(self) -> None:
        self._held = ""  # text that is no part yet
        self._is_thinking, self._has_thought, self._begun = self.opened, self.opened, False
        self._may_repeat = self.opened  # the opening of the prompt, as some models do
        self._is_marked = False  # a call came
        self._space = ""  # white space that is shown if more of the same kind follows
        self._shown = dict.fromkeys((CONTENT, REASONING), False)
        self._markers = self.dialect.markers if self.dialect else ()
        self._new = ""  # what came since a call was tried

    def push(self, text: str) -> list[Part]:
        self._held += text
        self._new += text
        return self._parts(is_all=False)

    def close(self) -> list[Part]:
        parts = self._parts(is_all=True)
        return [*parts, Part(CONTENT, self._space)] if self._space and self._shown[CONTENT] else parts

    def _parts(self, is_all: bool) -> list[Part]:
        parts: list[Part] = []
        while self._held and (found := self._next(is_all)) is not None:
            parts += found
        return parts

    def _next(self, is_all: bool) -> list[Part] | None:
        """The next parts; None if more text is needed."""
        if self._is_thinking:
            assert self.thoughts
            if self._may_repeat:
                return self._repeated(self.thoughts.opening.strip(), is_all)
            return self._until((self.thoughts.closing,), REASONING, is_all)
        if not self._begun:
            return self._begin(is_all)
        if self._markers and self.dialect and self._held.startswith(self._markers):
            return self._call(self.dialect, is_all)
        return self._until(self._markers, CONTENT, is_all)

    def _repeated(self, opening: str, is_all: bool) -> list[Part] | None:
        """Leaves out the opening of the reasoning where the answer repeats that of the prompt."""
        start = self._held.lstrip()
        if not is_all and opening.startswith(start) and start != opening:
            return None
        self._may_repeat = False
        if start.startswith(opening):
            self._held = start.removeprefix(opening)
        return []

    def _begin(self, is_all: bool) -> list[Part] | None:
        """Looks how the answer, or what follows its reasoning, begins."""
        start = self._held.lstrip()
        opening = self.thoughts.opening if self.thoughts and not self._has_thought else ""
        if opening and start.startswith(opening):
            self._held, self._is_thinking, self._has_thought = start[len(opening) :], True, True
            return []
        if not is_all and (not start or (opening and opening.startswith(start))):
            return None
        self._begun = True
        if self.dialect and self.dialect.starts and start.startswith(self.dialect.starts):
            self._held, self._markers = start, (*self._markers, *self.dialect.starts)
        return []

    def _call(self, dialect: Dialect, is_all: bool) -> list[Part] | None:
        if not is_all and self._new and not self._may_end(dialect):
            return None
        self._new = ""
        try:
            found = dialect.read(self._held, is_all, self.tools)
            if found is None and is_all:
                raise NotACall
        except NotACall:
            length = max(len(one) for one in self._markers if self._held.startswith(one))
            text, self._held, self._markers = self._held[:length], self._held[length:], dialect.markers
            return self._shown_text(CONTENT, text)
        if found is None:
            self._new = " "
            return None
        read, length = found
        self._held, self._space, self._is_marked = self._held[length:], "", True
        parts = [
            one for part in read for one in (self._shown_text(part.kind, part.text) if part.kind != CALL else [part])
        ]
        self._space = ""
        return parts

    def _may_end(self, dialect: Dialect) -> bool:
        """Whether what came since a call was tried may end it; a long one is only tried where it has its end."""
        if not ENDS.search(self._new):
            return False
        longest = max(map(len, dialect.ends), default=0)
        new = self._held[-len(self._new) - longest :]
        return len(self._held) < LONG or not dialect.ends or any(end in new for end in dialect.ends)

    def _until(self, marks: Sequence[str], kind: str, is_all: bool) -> list[Part] | None:
        """The text before the first of the marks, without what may be the beginning of one."""
        text = self._held
        place = min((at for mark in marks if (at := text.find(mark)) >= 0), default=-1)
        if place >= 0:
            self._held = text[place:]
            parts = self._shown_text(kind, text[:place])
            if kind == REASONING:
                assert self.thoughts
                self._held, self._is_thinking = self._held[len(self.thoughts.closing) :], False
                self._space, self._begun = "", False
            self._new = self._held
            return parts
        kept = 0 if is_all else max((_overlap(text, mark) for mark in marks), default=0)
        if kept == len(text):
            return None
        self._held = text[len(text) - kept :]
        return self._shown_text(kind, text[: len(text) - kept])

    def _shown_text(self, kind: str, text: str) -> list[Part]:
        """The text as a part, without white space at its end until more comes, and after the marks of reasoning."""
        if not self._shown[kind] and (self._has_thought or self._is_marked):
            text = text.lstrip()
        text = self._space + text
        end = len(text.rstrip())
        text, self._space = text[:end], text[end:]
        self._shown[kind] |= bool(text)
        return [Part(kind, text)] if text else []


LONG = 2048  # characters of a call from which on it is not tried with every piece
ENDS = re.compile(r"[}\])>;]")


def _overlap(text: str, mark: str) -> int:
    """Number of characters at the end of `text` that may be the start of `mark`."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if mark.startswith(text[-n:])), 0)


RECIPIENT = re.compile(r"\bto=([\w.:/-]+)")
CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
START, MESSAGE, BODY_ENDS = "<|start|>", "<|message|>", ("<|end|>", "<|call|>", "<|return|>", "<|start|>")


@dataclass
class HarmonyParser:
    """The parser of gpt-oss: messages with a header, whose channel says what the body is.

    `analysis` is reasoning; a body with a recipient `functions.NAME` is a call; all others are content.
    """

    tools: Schemas = field(default_factory=dict)
    reasons: bool = True  # show `analysis` as reasoning; else it is left out

    def __post_init__(self) -> None:
        self._held = ""
        self._kind, self._tool = "", ""  # of the body; empty in a header

    def push(self, text: str) -> list[Part]:
        self._held += text
        return self._parts(is_all=False)

    def close(self) -> list[Part]:
        return self._parts(is_all=True)

    def _parts(self, is_all: bool) -> list[Part]:
        parts: list[Part] = []
        while self._held and (found := self._body(is_all) if self._kind else self._header(is_all)) is not None:
            parts += found
        return parts

    def _header(self, is_all: bool) -> list[Part] | None:
        header, mark, rest = self._held.partition(MESSAGE)
        if not mark:
            text, self._held = (self._held, "") if is_all else ("", self._held)
            is_bare = bool(text.strip()) and not text.lstrip().startswith("<|")
            return ([Part(CONTENT, text)] if is_bare else []) if is_all else None
        self._held = rest
        channel, recipient = CHANNEL.search(header), RECIPIENT.search(header)
        self._tool = recipient[1].removeprefix("functions.") if recipient else ""
        is_analysis = channel is not None and channel[1] == "analysis"
        self._kind = CALL if self._tool else REASONING if is_analysis else CONTENT
        return []

    def _body(self, is_all: bool) -> list[Part] | None:
        text = self._held
        place = min((at for mark in BODY_ENDS if (at := text.find(mark)) >= 0), default=-1)
        kept = 0 if is_all else max(_overlap(text, mark) for mark in BODY_ENDS)
        end = place if place >= 0 else len(text) - kept
        if self._kind == CALL and place < 0 and not is_all:
            return None
        if end == 0 and place < 0:
            return None
        self._held = text[end:]
        parts = self._made(text[:end])
        if place >= 0:
            mark = next(mark for mark in BODY_ENDS if self._held.startswith(mark))
            self._held, self._kind = self._held[len(mark) if mark != START else 0 :], ""
        return parts

    def _made(self, text: str) -> list[Part]:
        if self._kind == CALL:
            try:
                return [call_of(self._tool, loaded(text), self.tools)]
            except NotACall:
                return [Part(CONTENT, text)]
        return [] if not text or (self._kind == REASONING and not self.reasons) else [Part(self._kind, text)]
