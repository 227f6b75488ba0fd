"""The caches of finished answers: the next turn of a chat runs only its new tokens."""

from __future__ import annotations

from collections.abc import Sequence

from llmconv.generation import Conversation
from llmconv.runtime import Runner


class ConversationPool:
    """The latest conversations, each used by one answer at a time; not thread-safe.

    Args:
        most: maximum number of conversations to keep; 0 for none.
        runner: runs their model.
    """

    def __init__(self, most: int, runner: Runner) -> None:
        self._most, self._runner = most, runner
        self._kept: list[Conversation] = []

    def take(self, prompt: Sequence[int]) -> Conversation:
        """Removes and returns the conversation that shares most tokens with `prompt`, or a new one.

        A conversation that shares less than half of its tokens is not used: it is another chat, which may continue.
        """
        shared = [(self._shared(kept, prompt), at) for at, kept in enumerate(self._kept)]
        tokens, at = max(shared, default=(0, 0))
        return self._kept.pop(at) if tokens else Conversation()

    def _shared(self, kept: Conversation, prompt: Sequence[int]) -> int:
        past = kept.past([prompt], self._runner)
        return past.tokens if past and 2 * past.tokens >= len(kept.ids) else 0

    def give_back(self, conversation: Conversation) -> None:
        """Puts a conversation back, and drops the oldest ones beyond the maximum."""
        if conversation.ids:
            self._kept.append(conversation)
        del self._kept[: max(len(self._kept) - self._most, 0)]
