"""Answers of the Hugging Face Hub as errors of llmconv: what to do, and never a token or a signed URL."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from llmconv.errors import InputRefused, LlmconvError, OutputFailed
from llmconv.hub.address import HubAddress

MOVED = (409, 412)
"""Statuses of a commit whose parent is no longer the latest commit of its branch."""

TOKEN = re.compile(r"[!-~]+")
"""Characters that a header can contain."""

CLIENTS = ("httpx", "httpcore", "requests", "urllib3")
"""Libraries whose errors mean that there was no answer."""

NO_ANSWER = (ConnectionError, TimeoutError)

AGAIN = "run the same command again; files that the Hub has already are not sent again"


def require_token() -> None:
    """Requires a token in HF_TOKEN or of the login.

    Raises:
        InputRefused: there is none.
    """
    from huggingface_hub import get_token  # noqa: PLC0415 - 0.3 s that other commands do not pay

    if not get_token():
        raise InputRefused(
            "not logged in to the Hugging Face Hub, which writing requires",
            hint="log in with `hf auth login`, or set HF_TOKEN to a token with write access",
        )


def require_sound_token() -> None:
    """Refuses a token that no header can contain, since the error of the library that finds out would quote it.

    Raises:
        InputRefused: there is such a token.
    """
    from huggingface_hub import get_token  # noqa: PLC0415

    if not TOKEN.fullmatch(get_token() or "none"):
        raise InputRefused(
            "the token of the Hugging Face Hub contains characters that no token has",
            hint="set HF_TOKEN again, or log in again with `hf auth login`",
        )


def hub_refusal(error: BaseException, address: HubAddress) -> InputRefused | None:
    """The error for an answer that will not change: no such model, no access; None if there was no clear answer."""
    from huggingface_hub import errors  # noqa: PLC0415

    if isinstance(error, errors.GatedRepoError):
        return InputRefused(
            f"`{address.repository}` is a gated repository, and access was not granted",
            hint="request access on its page, and log in with `hf auth login`",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return InputRefused(
            f"`{address.repository}` on the hub has no revision `{address.revision}`",
            hint="give a branch, a tag or a commit",
        )
    if isinstance(error, errors.RepositoryNotFoundError | errors.HFValidationError):
        return InputRefused(
            f"`{address.short}` does not exist, neither on this machine nor on the hub",
            hint="check the spelling; for a private model log in with `hf auth login`",
        )
    return None


@contextmanager
def writing_to(address: HubAddress) -> Iterator[None]:
    """Turns errors of huggingface_hub inside the block into those of llmconv.

    Raises:
        InputRefused: no access, no such repository, or no network is allowed.
        OutputFailed: the branch moved, the Hub is busy, or cannot be reached.
    """
    try:
        yield
    except (LlmconvError, MemoryError, KeyboardInterrupt):
        raise
    except Exception as error:  # the class for "no connection" differs between versions
        cause = _cause(error)
        problem = _problem(cause, address)
        if problem is None:
            raise
        raise problem from (None if _shows_token(error) else cause)


def _cause(error: BaseException) -> BaseException:
    """The first error of a chain that is an answer, or the absence of one: uploads wrap it in a RuntimeError."""
    while type(error) is RuntimeError and error.__cause__ is not None:
        error = error.__cause__
    return error


def _problem(error: BaseException, address: HubAddress) -> LlmconvError | None:
    from huggingface_hub import errors  # noqa: PLC0415

    if isinstance(error, errors.OfflineModeIsEnabled):
        return InputRefused(f"`{address}` cannot be reached: HF_HUB_OFFLINE is set", hint="unset it, and run again")
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.HfHubHTTPError) and status:
        return _denied(status, error, address) or hub_refusal(error, address) or _failed(status, error, address)
    if isinstance(error, errors.HFValidationError):
        return InputRefused(
            f"`{address.repository}` is not a name that the Hub accepts for a repository",
            hint="use letters, digits, `-`, `_` and `.`, at most 96 of them, without `--` and `..`",
        )
    if isinstance(error, (*NO_ANSWER, errors.LocalEntryNotFoundError)) or type(error).__module__.startswith(CLIENTS):
        return OutputFailed(f"the Hub cannot be reached or broke off ({type(error).__name__})", hint=AGAIN)
    if isinstance(error, ValueError | RuntimeError):
        return OutputFailed(f"the upload failed: {_without_token(' '.join(str(error).split()))[:300]}", hint=AGAIN)
    return None


def _denied(status: int, error: BaseException, address: HubAddress) -> InputRefused | None:
    from huggingface_hub import errors  # noqa: PLC0415

    if isinstance(error, errors.GatedRepoError) or status not in (401, 403):
        return None
    if status == 401:
        return InputRefused(
            f"the Hub does not accept the token for `{address.repository}`{_said(error)}",
            hint="log in again with `hf auth login`, or set HF_TOKEN to a valid token",
        )
    return InputRefused(
        f"the token may not write to `{address.repository}`{_said(error)}",
        hint="use a token with write access, or a repository of your own; `llmconv push --pr` proposes a change",
    )


def _failed(status: int, error: BaseException, address: HubAddress) -> OutputFailed:
    if status in MOVED:
        return OutputFailed(
            f"`{address.short}` got another commit in the meantime, so nothing was committed",
            hint="look at that commit, and run again; files that were sent are not sent again",
        )
    return OutputFailed(f"the Hub answered {status} for `{address.repository}`{_said(error)}", hint=AGAIN)


def _said(error: BaseException) -> str:
    """The Hub's own words in parentheses; its URLs may be signed, so the rest is not shown."""
    words = " ".join(str(getattr(error, "server_message", "") or "").split())
    return f" ({_without_token(words)[:200]})" if words else ""


def _shows_token(error: BaseException | None) -> bool:
    """Whether the message of an error, or of one that led to it, contains the token."""
    shown = False
    while error is not None and not shown:
        shown = str(error) != _without_token(str(error))
        error = error.__cause__ or error.__context__
    return shown


def _without_token(text: str) -> str:
    from huggingface_hub import get_token  # noqa: PLC0415

    token = get_token()
    return text.replace(token, "***") if token else text
