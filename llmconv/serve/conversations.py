"""The caches of answers that have ended: a chat's next turn runs only what is new."""

from __future__ import annotations

from collections.abc import Sequence

from llmconv.generation import Conversation


class Conversations:
    """The latest conversations, each taken by one answer at a time; for one thread.

    Args:
        most: how many are kept; 0 for none.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: list[Conversation] = []

    def take(self, prompt: Sequence[int]) -> Conversation:
        """The conversation with which most of `prompt` is done, or a new one; nobody else gets it until it is back."""
        fitting = [kept for kept in self._kept if kept.past(prompt) is not None]
        if not fitting:
            return Conversation()
        best = max(fitting, key=lambda kept: len(kept.ids))
        self._kept.remove(best)
        return best

    def give_back(self, conversation: Conversation) -> None:
        """Keeps it, and forgets the one that lies there longest."""
        if conversation.ids:
            self._kept.append(conversation)
        del self._kept[: max(len(self._kept) - self._most, 0)]
