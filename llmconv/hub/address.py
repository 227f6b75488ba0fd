"""HubAddress: a model repository of the Hugging Face Hub, such as `hf://org/name@v2/onnx`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import unquote

from llmconv.errors import InputRefused

OTHER_KINDS = {"datasets": "a dataset", "spaces": "a space", "buckets": "a bucket", "kernels": "a kernel"}
"""First part of an address of something else than a model; the Hub reserves these names."""

PARTS = re.compile(
    r"\s*hf://(?:(?P<kind>models|datasets|spaces|buckets|kernels)/)?"
    r"(?P<repository>[^/@\s]+(?:/[^/@\s]+)?)(?:@(?P<revision>refs/(?:convert/[\w.-]+|pr/\d+)|[^/@\s]+))?"
    r"(?:/(?P<folder>[^@]*?))?/*\s*"
)
"""As in `HfFileSystem`; a slash in the name of a branch is written `%2F`."""

NAME = re.compile(r"[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?", re.ASCII)
HUB_NAME = re.compile(rf"{NAME.pattern}(?:@[\w./+-]+)?", re.ASCII)  # `[org/]name[@revision]`
REVISION = re.compile(r"[\w./+-]+")
COMMIT = re.compile(r"[0-9a-f]{40}")  # a commit, which nothing can be added to


@dataclass(frozen=True)
class HubAddress:
    """A model repository on the Hub, or a folder or file in it."""

    repository: str  # `org/name`, or the bare name of one of the oldest models
    revision: str = ""  # a branch, tag or commit; empty for `main`
    folder: str = ""  # path of a folder or file in the repository; empty for all of it

    def __str__(self) -> str:
        return f"hf://{self.short}"

    @property
    def short(self) -> str:
        """`org/name[@revision][/folder]`, as people write it in prose."""
        revision = f"@{self.revision}" if self.revision else ""
        return f"{self.repository}{revision}" + (f"/{self.folder}" if self.folder else "")

    @property
    def name(self) -> str:
        """The last part, as of a folder on the disk."""
        return (self.folder or self.repository).rpartition("/")[2]


def is_hub_address(value: object) -> bool:
    """Whether `value` is the text of an address of the Hub, also of one that is not a model."""
    return isinstance(value, HubAddress) or (isinstance(value, str) and value.strip().lower().startswith("hf://"))


def parse_hub_address(text: str) -> HubAddress:
    """The address `hf://[models/]org/name[@revision][/folder]`; InputRefused for others, a dataset, a space."""
    found = PARTS.fullmatch("hf://" + text.strip()[len("hf://") :])
    if found and found["kind"] in OTHER_KINDS:
        raise InputRefused(
            f"`{text.strip()}` is {OTHER_KINDS[found['kind']]} of the Hugging Face Hub, not a model",
            hint="give a model repository: `hf://org/name`; download other things with `hf download` or `hf sync`",
        )
    if not found or not NAME.fullmatch(found["repository"]):
        raise _malformed(text)
    revision, folder = unquote(found["revision"] or ""), found["folder"] or ""
    parts = folder.split("/") if folder else []
    if (revision and not REVISION.fullmatch(revision)) or any(
        p in ("", ".", "..") or not p.isprintable() for p in parts
    ):
        raise _malformed(text)
    return HubAddress(found["repository"], revision, folder)


def hub_address(name: str) -> HubAddress:
    """The address of a hub id, `[org/]name[@revision]`, or of `hf://…`; raises InputRefused as `parse_hub_address`."""
    if is_hub_address(name):
        return parse_hub_address(name)
    repository, _, revision = name.partition("@")
    return HubAddress(repository, revision)


def _malformed(text: str) -> InputRefused:
    return InputRefused(
        f"`{text.strip()}` is not the address of a model on the Hugging Face Hub",
        hint="write it as `hf://org/name`, `hf://org/name@revision` or `hf://org/name@revision/folder`",
    )
