"""The first messages of a connection: both sides prove that they run the same protocol, model and export.

    stage     greeting   protocol, nonce
    client    hello      proof (of the shared token), fingerprint of every stage, seconds of silence that it accepts
    stage     stage      its number, its fingerprint, shapes and names of its inputs by use
    either    refused    message, hint

The token itself is never sent: the proof is HMAC-SHA256 of the nonce.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Sequence

from llmconv.errors import StageFailed
from llmconv.runtime.stages.connection import Connection
from llmconv.runtime.stages.message import BadMessage, Message

TOKEN = "LLMCONV_STAGE_TOKEN"
"""Environment variable with the shared token, the same on both sides; empty or missing for none."""

PROTOCOL = 1
MAX_STAGES = 1024

OTHER_EXPORT = (
    "the folders on both sides must be copies of one export: copy llmconv.json and the files of the stage again"
)


def token() -> str:
    """The shared token of this process."""
    return os.environ.get(TOKEN, "")


class Refused(Exception):
    """The peer is refused; it gets the reason.

    Args:
        message: one line.
        hint: the way out.
    """

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint

    def answer(self) -> Message:
        """The message to the peer."""
        return Message("refused", {"message": str(self), "hint": self.hint})


def greet(connection: Connection, number: int, fingerprints: Sequence[str], shared: str, within: float) -> float:
    """Greets a client and checks its answer; returns the seconds of silence that the client accepts.

    Args:
        connection: to the client.
        number: of this stage.
        fingerprints: of all stages of the export.
        shared: token that the client must have, or empty.
        within: time limit of the whole answer, in seconds.

    Raises:
        Refused: the client has another token, model or export.
        BadMessage: it sends something else.
        EOFError, OSError: it is gone, or silent.
    """
    nonce = secrets.token_hex(16)
    connection.send(Message("greeting", {"protocol": PROTOCOL, "nonce": nonce}))
    hello = connection.receive(max_body=0, within=within)
    if hello.kind != "hello":
        raise BadMessage("the first message is not `hello`")
    if shared and not hmac.compare_digest(_bytes(hello.text("proof")), _bytes(_proof(shared, nonce))):
        raise Refused("the token is not that of the stage", f"set {TOKEN} to the same text on both sides")
    if hello.fields.get("fingerprints") != list(fingerprints):
        raise Refused(f"stage {number} is one of another model or export", OTHER_EXPORT)
    return hello.number("silence", 1_000_000) / 1000


def introduce(connection: Connection, fingerprints: Sequence[str], silence: float) -> int:
    """Answers the greeting of a stage and checks what it is; returns its number.

    Args:
        connection: to the stage.
        fingerprints: of all stages of the export.
        silence: seconds without a heartbeat after which the stage is given up.

    Raises:
        StageFailed: the stage refuses, or belongs to another model or export.
        BadMessage: it sends something else.
        EOFError, OSError: it is gone, or silent.
    """
    greeting = connection.receive(max_body=0)
    if greeting.kind != "greeting" or greeting.number("protocol") != PROTOCOL:
        raise BadMessage("another version of the protocol")
    proof = _proof(token(), greeting.text("nonce"))
    fields = {"proof": proof, "fingerprints": list(fingerprints), "silence": round(silence * 1000)}
    connection.send(Message("hello", fields))
    stage = connection.receive(max_body=0)
    if stage.kind == "refused":
        raise StageFailed(stage.text("message"), hint=stage.text("hint"))
    if stage.kind != "stage":
        raise BadMessage("the answer is not `stage`")
    number = stage.number("number", len(fingerprints))
    if number < 1 or stage.text("fingerprint") != fingerprints[number - 1]:
        raise StageFailed("it is a stage of another model or export", hint=OTHER_EXPORT)
    return number


def _proof(shared: str, nonce: str) -> str:
    return hmac.new(_bytes(shared), _bytes(nonce), hashlib.sha256).hexdigest()


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
