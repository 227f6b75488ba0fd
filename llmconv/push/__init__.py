"""`llmconv push`: a folder that llmconv made becomes one commit on the Hugging Face Hub."""

from llmconv.push.push import Push, push

__all__ = ["Push", "push"]


def __dir__() -> list[str]:
    """The public names."""
    return __all__
