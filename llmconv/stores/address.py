"""StoreAddress: the place of a folder or object in an object store, such as `s3://bucket/models/base`."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from llmconv.errors import InputRefused

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
"""Scheme that a user may write to the one that is used."""

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
