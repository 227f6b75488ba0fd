"""ObjectStore: the objects below one address. Errors of the store become OutputFailed or InputRefused.

obstore reads the credentials of the environment, which never leave it: keys, web identity and metadata of AWS; service
accounts and application default credentials of Google; keys, SAS and workload identity of Azure. Profiles and SSO of
AWS need boto3 (`pip install boto3`).
"""

from __future__ import annotations

import builtins
import os
import re
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from itertools import islice
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from llmconv.addresses import StoreAddress
from llmconv.background import store_call
from llmconv.errors import InputRefused, LlmconvError, OutputFailed, UnsupportedInput

MEBIBYTE = 1 << 20
# bytes of a part of a multipart upload, unless more are needed for `MOST_PARTS`; S3 wants at least 5 MiB
LEAST_PART = 8 * MEBIBYTE
MOST_PARTS = 9_000  # S3 takes 10,000
PARTS_AT_ONCE = 4  # parts in flight; memory is as many parts and the one that is filled
# bytes of a range that are taken at once: memory is about as much per request, and not the whole range
BLOCK = 256 << 10
MOST_OBJECTS = 1_000_000  # of a folder: a listing is kept in memory, and that of a hostile or broken store need not end
LISTINGS = 10  # how often a listing is asked for, as often as obstore repeats other requests
SMALL_AT_ONCE = 16  # requests in flight for small objects
# what stores answer if there is no such bucket: S3's and Google's code, and Azure's
NO_BUCKET = re.compile(r"<Code>NoSuchBucket</Code>|\bContainerNotFound\b")
DENIED = ("PermissionDeniedError", "UnauthenticatedError")  # names of obstore's classes for missing rights

# what stores answer if an account, a bucket or a disk has no room: S3's codes, and those of MinIO, Ceph and others
FULL = re.compile(
    r"status code: 507\b|<Code>\w*(InsufficientStorage|StorageFull|QuotaExceeded|EntityTooLarge|TooLargeObject)</Code>"
)


@dataclass(frozen=True)
class Head:
    """What a store reports about an object."""

    key: str  # path below the address
    size: int  # bytes
    e_tag: str  # changes with the content, without quotes; empty if the store has none
    modified: int = 0  # when it was written, in ns since 1970


class ObjectStore:
    """The objects below `address`, of a folder or a bucket; all keys are relative to it.

    With `writes`, an output is made there, so that a denied access is a failure of the output. Raises UnsupportedInput
    without obstore, InputRefused if the address is not usable. Methods raise InputRefused for no such bucket, or no
    access from the beginning; OutputFailed if the store fails otherwise, after retries.
    """

    def __init__(self, address: StoreAddress, *, writes: bool = False) -> None:
        self.address = address
        self._writes = writes
        self._was_allowed = False
        self._connection = connect(address)

    def head(self, key: str) -> Head | None:
        """Size and ETag of an object, None if there is none."""
        import obstore  # noqa: PLC0415 - an extra

        with self._failing(key):
            try:
                return _head(obstore.head(self._connection, key))
            except FileNotFoundError:
                return None

    def list(self, prefix: str = "") -> Iterator[Head]:
        """All objects whose path begins with the folder `prefix`."""
        with self._failing(prefix):
            found = self._listing(prefix)
        yield from found

    def _listing(self, prefix: str) -> builtins.list[Head]:
        """One listing; one that is cut short is repeated, which obstore does for other answers only."""
        import obstore  # noqa: PLC0415
        from obstore.exceptions import GenericError  # noqa: PLC0415

        for tries in reversed(range(LISTINGS)):
            try:
                listed = (_head(meta) for batch in obstore.list(self._connection, prefix or None) for meta in batch)
                if len(found := [*islice(listed, MOST_OBJECTS + 1)]) > MOST_OBJECTS:
                    problem = f"`{self.address / prefix}` has more than {MOST_OBJECTS:,} objects"
                    raise InputRefused(problem, hint="is this the right address? give the folder of one model")
                return without_markers(found, prefix)
            except GenericError as error:
                if not tries or "body" not in first_line(error):
                    raise
        raise AssertionError("not reached")

    def read(self, key: str, limit: int) -> bytes | None:
        """The content of a small object, None if there is none; raises InputRefused for more than `limit` bytes."""
        import obstore  # noqa: PLC0415

        with self._failing(key):
            try:
                answer = obstore.get(self._connection, key)
                if answer.meta["size"] > limit:
                    raise InputRefused(
                        f"`{self.address / key}` has {answer.meta['size']:,} bytes, {limit:,} at most are expected",
                        hint="is this the right address?",
                    )
                return bytes(answer.bytes())
            except FileNotFoundError:
                return None

    def read_range(self, head: Head, start: int, stop: int) -> bytes:
        """Bytes `start` to `stop` of an object; see `blocks`."""
        return b"".join(self.blocks(head, start, stop))

    def blocks(self, head: Head, start: int, stop: int) -> Iterator[memoryview]:
        """Bytes `start:stop` of an object by one request in about `BLOCK`s; InputRefused unless `head` describes it."""
        import obstore  # noqa: PLC0415

        strong = head.e_tag and not head.e_tag.startswith("W/")
        options: Any = {"range": (start, stop), **({"if_match": f'"{head.e_tag}"'} if strong else {})}
        with self._failing(head.key):
            answer = obstore.get(self._connection, head.key, options=options)
            if _tag(answer.meta) != head.e_tag or answer.meta["size"] != head.size:
                raise self.changed(head.key)
            self._was_allowed = True
            for block in answer.stream(min_chunk_size=BLOCK):
                yield memoryview(block)

    def write(self, key: str, blocks: bytes | Iterable[memoryview], size: int) -> str:
        """Writes an object of `size` bytes, visible as a whole, and its ETag; an error of `blocks` ends the upload."""
        import obstore  # noqa: PLC0415

        content = blocks if isinstance(blocks, bytes) else _marked(blocks)
        try:
            with self._failing(key, writes=True):
                result = obstore.put(
                    self._connection, key, content, chunk_size=part_bytes(size), max_concurrency=PARTS_AT_ONCE
                )
        except _BlocksFailed as failure:
            raise failure.error from failure.error.__cause__
        return _tag(result)

    def create(self, key: str, content: bytes) -> bool:
        """Writes an object unless there is one, whether it did; asks before: a store may ignore conditions."""
        return self.head(key) is None and not self.refuses_second(key, content)

    def refuses_second(self, key: str, content: bytes) -> bool:
        """Writes an object on the condition that there is none; returns whether the store refused that."""
        import obstore  # noqa: PLC0415
        from obstore.exceptions import AlreadyExistsError, PreconditionError  # noqa: PLC0415

        with self._failing(key, writes=True):
            try:
                obstore.put(self._connection, key, content, mode="create")
            except (AlreadyExistsError, PreconditionError):
                return True
        return False

    def delete(self, keys: Iterable[str]) -> None:
        """Deletes objects; those that do not exist are no error."""
        import obstore  # noqa: PLC0415

        for key in keys:
            with self._failing(key, writes=True):
                try:
                    obstore.delete(self._connection, key)
                except FileNotFoundError:
                    continue

    def read_all(self, keys: Sequence[str], limit: int) -> Sequence[bytes | None]:
        """As `read`, several objects at once: a model of 405 B has 200 journal entries."""
        with ThreadPoolExecutor(SMALL_AT_ONCE) as pool:
            return [*pool.map(lambda key: self.read(key, limit), keys)]

    def delete_all(self, keys: Iterable[str]) -> None:
        """As `delete`, several objects at once, in any order."""
        with ThreadPoolExecutor(SMALL_AT_ONCE) as pool:
            deque(pool.map(lambda key: self.delete([key]), keys), maxlen=0)

    def changed(self, key: str) -> InputRefused:
        problem = f"`{self.address / key}` changed while it was read"
        return InputRefused(problem, hint="make sure that nothing writes to it, and run again")

    @contextmanager
    def _failing(self, key: str, *, writes: bool = False) -> Iterator[None]:
        """Turns the store's errors into llmconv's; only their first line is shown, and no credential is in it."""
        from obstore import exceptions  # noqa: PLC0415

        try:
            with store_call():
                yield
        except exceptions.PreconditionError as error:
            raise self.changed(key) from error
        except FileNotFoundError as error:
            if NO_BUCKET.search(str(error)):
                raise self._problem(key, error, writes=writes) from error
            problem = f"`{self.address / key}` does not exist"
            raise InputRefused(problem, hint="check the bucket and the path") from error
        except (exceptions.BaseError, OSError) as error:
            raise self._problem(key, error, writes=writes) from error

    def _problem(self, key: str, error: Exception, *, writes: bool) -> LlmconvError:
        again = "run again" + (" with `--resume`" if writes or self._writes else "")
        if (writes or self._writes) and FULL.search(str(error)):
            message = f"no space left in the store for `{self.address / key}`"
            return OutputFailed(message, hint=f"free some space there, and {again}")
        if NO_BUCKET.search(str(error)):
            hint = "check its name, and the region or endpoint in the environment; llmconv does not make buckets"
            return InputRefused(f"there is no bucket `{self.address.bucket}` in this store", hint=hint)
        if type(error).__name__ in DENIED or "403 Forbidden" in str(error):  # listings have no class for it
            begun = writes or self._writes or self._was_allowed  # then they have been revoked
            hint = f"check the credentials in the environment, and what they may do with this bucket, and {again}"
            return (OutputFailed if begun else InputRefused)(f"access to `{self.address / key}` was denied", hint=hint)
        problem = f"the store failed: `{self.address / key}`: {first_line(error)}"
        return OutputFailed(problem, hint=f"check the network and the store, and {again}")


class _BlocksFailed(Exception):
    """An exception of the content that is written, which is none of the store."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error


def _marked(blocks: Iterable[memoryview]) -> Iterator[memoryview]:
    try:
        yield from blocks
    except Exception as error:
        raise _BlocksFailed(error) from error


def part_bytes(size: int) -> int:
    """Bytes per part of an upload of `size` bytes, in whole MiB."""
    return max(LEAST_PART, -(-size // MOST_PARTS // MEBIBYTE) * MEBIBYTE)


def _head(meta: Any) -> Head:
    return Head(meta["path"], meta["size"], _tag(meta), int(meta["last_modified"].timestamp() * 1e9))


def _tag(meta: Any) -> str:
    """The ETag without its quotes, which Azure's listings do not have, and its other answers do."""
    return str(meta["e_tag"] or "").strip('"')


if TYPE_CHECKING:
    from obstore.store import ObjectStore as Connection

# busy stores (503) and interrupted bodies are asked again
RETRIES: Any = {
    "max_retries": 10,
    "backoff": {"base": 2, "init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=15)},
    "retry_timeout": timedelta(minutes=3),
}
# oracle's endpoint that speaks S3, with its customer secret keys
ORACLE = "https://{namespace}.compat.objectstorage.{region}.oraclecloud.com"


def connect(address: StoreAddress) -> Connection:
    """A connection whose paths are relative to `address`; nothing is requested yet.

    Raises UnsupportedInput if obstore is not installed, or cannot be used in this process; InputRefused if the address
    or the environment lacks what this store needs.
    """
    if find_spec("obstore") is None:
        raise UnsupportedInput(f"`{address}` needs obstore, which is not installed", hint="`pip install obstore`")
    # refuses a fork of a process that has used obstore, whose threads it does not have: it would wait forever
    _users.add(os.getpid())
    if len(_users) > 1:
        raise UnsupportedInput(
            f"`{address}` cannot be opened in a fork of a process that has used an object store",
            hint="start processes by `spawn` or `forkserver`, as `multiprocessing.get_context` does",
        )
    from obstore.exceptions import BaseError  # noqa: PLC0415 - an extra
    from obstore.store import S3Store, from_url  # noqa: PLC0415

    try:
        if address.scheme in ("s3", "oci"):
            return S3Store(
                address.bucket.partition("@")[0],
                prefix=address.key or None,
                **_s3_options(address, os.environ),
                retry_config=RETRIES,
            )
        return from_url(str(address), retry_config=RETRIES)
    except (BaseError, ValueError) as error:
        problem = f"cannot connect to `{address}`: {first_line(error)}"
        raise InputRefused(problem, hint="check the address and the environment variables") from error


_users: set[int] = set()  # this process, if it has connected to a store, and the one that it was forked from


def without_markers(heads: Sequence[Head], prefix: str) -> list[Head]:
    """The objects without empty ones in the place of a folder, as S3's console and Azure make them for a new folder."""
    empty = {head.key for head in heads if not head.size}
    if not empty:
        return [*heads]
    folders = {prefix.strip("/"), *(str(parent) for head in heads for parent in PurePosixPath(head.key).parents)}
    return [head for head in heads if head.key not in empty & folders]


def open_uploads(address: StoreAddress, names: Collection[str]) -> tuple[Any, list[dict[str, str]]] | None:
    """A boto3 client and the open uploads (abort arguments) of `names`; None without boto3 or S3."""
    if address.scheme not in ("s3", "oci") or find_spec("boto3") is None:
        return None
    import boto3  # noqa: PLC0415 - an extra

    options = _s3_options(address, os.environ)
    client = boto3.client("s3", endpoint_url=options.get("endpoint"), region_name=options.get("region"))
    bucket, found = address.bucket.partition("@")[0], []
    prefix, keys = f"{address.key}/" if address.key else "", {(address / name).key for name in names}
    for page in client.get_paginator("list_multipart_uploads").paginate(Bucket=bucket, Prefix=prefix):
        uploads = [each for each in page.get("Uploads", ()) if each["Key"] in keys]
        found += [{"Bucket": bucket, "Key": each["Key"], "UploadId": each["UploadId"]} for each in uploads]
    return client, found


def abort_uploads(address: StoreAddress, names: Collection[str]) -> int | None:
    """Aborts the multipart uploads of some objects, see `open_uploads`; returns how many, or None as it does."""
    if not (found := open_uploads(address, names)):
        return None
    client, uploads = found
    for upload in uploads:
        client.abort_multipart_upload(**upload)
    return len(uploads)


def _s3_options(address: StoreAddress, environment: Mapping[str, str]) -> dict[str, Any]:
    """Options beyond those that obstore takes from the environment."""
    endpoint = environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL") or ""
    options: dict[str, Any] = {}
    if address.scheme == "oci":
        namespace = address.bucket.partition("@")[2] or environment.get("OCI_NAMESPACE")
        options["region"] = region = environment.get("OCI_REGION") or environment.get("AWS_REGION")
        if not endpoint and not (namespace and region):
            hint = "write it as `oci://BUCKET@NAMESPACE/FOLDER`, and set OCI_REGION, such as eu-frankfurt-1"
            raise InputRefused(f"`{address}` lacks its namespace or region", hint=hint)
        endpoint = endpoint or ORACLE.format(namespace=namespace, region=region)
    if endpoint:
        options["endpoint"] = endpoint
        options["client_options"] = {"allow_http": endpoint.startswith("http://")}
    if provider := _profile(environment):
        options["credential_provider"] = provider
    return {name: value for name, value in options.items() if value is not None}


def _profile(environment: Mapping[str, str]) -> Any:
    """boto3's credentials where AWS_PROFILE names a profile, which obstore does not read."""
    if not environment.get("AWS_PROFILE") or environment.get("AWS_ACCESS_KEY_ID"):
        return None
    if find_spec("boto3") is None:
        raise UnsupportedInput("AWS_PROFILE needs boto3, which is not installed", hint="`pip install boto3`")
    from obstore.auth.boto3 import Boto3CredentialProvider  # noqa: PLC0415 - an extra

    return Boto3CredentialProvider()


def first_line(error: BaseException) -> str:
    """The first line of an error of obstore; the others are its internal state."""
    return str(error).partition("\n")[0].strip().rstrip(":")
