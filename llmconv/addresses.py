"""Addresses of folders and files in object stores, such as `s3://bucket/folder`, and on the Hugging Face Hub."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from urllib.parse import unquote

from llmconv.errors import InputRefused

# scheme that a user may write to the one that is used
SCHEMES = {
    "s3": "s3",
    "s3a": "s3",
    "gs": "gs",
    "gcs": "gs",
    "az": "az",
    "azure": "az",
    "abfs": "abfss",
    "abfss": "abfss",
    "oci": "oci",
}
WITH_HOST = ("abfss", "oci")  # schemes in which the bucket is followed by `@` and its account or namespace
SAME_STORES = {"abfss": "az", "oci": "s3"}  # schemes of stores that can be reached by another scheme, too; to that one
PARTS = re.compile(r"\s*(?P<scheme>[A-Za-z0-9]+)://(?P<bucket>[^/?#]*)/?(?P<key>.*)", re.DOTALL)


@dataclass(frozen=True)
class StoreAddress:
    """A folder, or an object, in an object store."""

    scheme: str  # one of the values of `SCHEMES`
    bucket: str  # the bucket or container, for some schemes with `@` and its account
    key: str = ""  # path in the bucket, without slashes at its ends; empty for the bucket itself

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}" + (f"/{self.key}" if self.key else "")

    @property
    def name(self) -> str:
        return self.key.rpartition("/")[2] or self.bucket

    @property
    def parent(self) -> StoreAddress:
        """The folder that contains it; the bucket itself for a key without slashes."""
        return StoreAddress(self.scheme, self.bucket, self.key.rpartition("/")[0])

    def is_within(self, other: StoreAddress) -> bool:
        """Whether this is `other`, or below it, also if the two name one bucket in different ways."""
        mine, its = ((SAME_STORES.get(a.scheme, a.scheme), a.bucket.partition("@")[0]) for a in (self, other))
        return mine == its and f"{self.key}/".startswith(f"{other.key}/" if other.key else "")

    def __truediv__(self, name: str) -> StoreAddress:
        """The address of `name`, a path below this folder."""
        return StoreAddress(self.scheme, self.bucket, f"{self.key}/{name}".strip("/"))


def is_store_address(value: object) -> bool:
    """Whether `value` is the text of an address in an object store that llmconv can write to."""
    if isinstance(value, StoreAddress):
        return True
    found = PARTS.fullmatch(os.fspath(value)) if isinstance(value, str) else None
    return bool(found) and found["scheme"].lower() in SCHEMES if found else False


def parse_address(text: str) -> StoreAddress:
    """A user's address; InputRefused without a bucket, for credentials, a query, or a path that is not plain."""
    found = PARTS.fullmatch(text.strip())
    scheme = SCHEMES.get(found["scheme"].lower(), "") if found else ""
    if not found or not scheme:
        raise InputRefused("not an address in an object store", hint=f"addresses begin with {', '.join(SCHEMES)}")
    bucket, key = found["bucket"], found["key"].strip("/")
    if odd := next((sign for sign in "?#" if sign in key), ""):
        raise InputRefused(
            f"an address of `{scheme}://` contains no query and no fragment, so no path with `{odd}` can be given",
            hint="copy what is there to another path, or to this machine; credentials belong into the environment",
        )
    if ("@" in bucket and scheme not in WITH_HOST) or "?" in text or "#" in text or bucket.count("@") > 1:
        raise InputRefused(
            f"an address of `{scheme}://` contains a bucket and a path, no credentials and no query",
            hint="give credentials by the environment, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
        )
    if not bucket or not bucket.isprintable() or ":" in bucket:
        raise InputRefused(f"`{scheme}://` has no bucket", hint=f"write it as `{scheme}://BUCKET/FOLDER`")
    parts = key.split("/") if key else []
    if any(part in ("", ".", "..") or not part.isprintable() for part in parts):
        raise InputRefused(f"`{scheme}://{bucket}/{key}` is not a plain path", hint="leave out `..` and empty parts")
    return StoreAddress(scheme, bucket, key)


# first part of an address of something else than a model; the Hub reserves these names
OTHER_KINDS = {"datasets": "a dataset", "spaces": "a space", "buckets": "a bucket", "kernels": "a kernel"}
# as in `HfFileSystem`; a slash in the name of a branch is written `%2F`
HUB_PARTS = re.compile(
    r"\s*hf://(?:(?P<kind>models|datasets|spaces|buckets|kernels)/)?"
    r"(?P<repository>[^/@\s]+(?:/[^/@\s]+)?)(?:@(?P<revision>refs/(?:convert/[\w.-]+|pr/\d+)|[^/@\s]+))?"
    r"(?:/(?P<folder>[^@]*?))?/*\s*"
)
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
    found = HUB_PARTS.fullmatch("hf://" + text.strip()[len("hf://") :])
    if found and found["kind"] in OTHER_KINDS:
        raise InputRefused(
            f"`{text.strip()}` is {OTHER_KINDS[found['kind']]} of the Hugging Face Hub, not a model",
            hint="give a model repository: `hf://org/name`; download other things with `hf download` or `hf sync`",
        )
    revision, folder = (unquote(found["revision"] or ""), found["folder"] or "") if found else ("", "")
    are_plain = all(part not in ("", ".", "..") and part.isprintable() for part in folder.split("/") if folder)
    is_sound = are_plain and REVISION.fullmatch(revision or "main")
    if not found or not NAME.fullmatch(found["repository"]) or not is_sound:
        hint = "write it as `hf://org/name`, `hf://org/name@revision` or `hf://org/name@revision/folder`"
        raise InputRefused(f"`{text.strip()}` is not the address of a model on the Hugging Face Hub", hint=hint)
    return HubAddress(found["repository"], revision, folder)


def hub_address(name: str) -> HubAddress:
    """The address of a hub id, `[org/]name[@revision]`, or of `hf://…`; raises InputRefused as `parse_hub_address`."""
    if is_hub_address(name):
        return parse_hub_address(name)
    repository, _, revision = name.partition("@")
    return HubAddress(repository, revision)
