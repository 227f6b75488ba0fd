"""The caches of answers that have ended: a chat's next turn runs only what is new."""

from __future__ import annotations

from collections.abc import Sequence

from llmconv.generation import Conversation
from llmconv.runtime import Runner


class ConversationPool:
    """The latest conversations, each taken by one answer at a time; for one thread.

    Args:
        most: how many are kept; 0 for none.
        runner: whose caches they hold.
    """

    def __init__(self, most: int, runner: Runner) -> None:
        self._most, self._runner = most, runner
        self._kept: list[Conversation] = []

    def take(self, prompt: Sequence[int]) -> Conversation:
        """The conversation with which most of `prompt` is done, or a new one; nobody else gets it until it is back.

        One that shares less than half of its tokens stays: it is another chat, which may go on.
        """
        shared = [(self._shared(kept, prompt), at) for at, kept in enumerate(self._kept)]
        tokens, at = max(shared, default=(0, 0))
        return self._kept.pop(at) if tokens else Conversation()

    def _shared(self, kept: Conversation, prompt: Sequence[int]) -> int:
        past = kept.past([prompt], self._runner)
        return past.tokens if past and 2 * past.tokens >= len(kept.ids) else 0

    def give_back(self, conversation: Conversation) -> None:
        """Keeps it, and forgets the one that lies there longest."""
        if conversation.ids:
            self._kept.append(conversation)
        del self._kept[: max(len(self._kept) - self._most, 0)]
