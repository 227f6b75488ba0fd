"""Connects to a store with the credentials of the environment, which never leave it.

obstore reads them itself: keys, web identity and metadata of AWS; service accounts and application default credentials
of Google; keys, SAS and workload identity of Azure. Profiles and SSO of AWS need boto3 (`pip install boto3`).
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from datetime import timedelta
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from llmconv.errors import InputRefused, UnsupportedInput
from llmconv.stores.address import StoreAddress

if TYPE_CHECKING:
    from obstore.store import ObjectStore as Connection

RETRIES = {
    "max_retries": 10,
    "backoff": {"base": 2, "init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=15)},
    "retry_timeout": timedelta(minutes=3),
}
"""Busy stores (503) and interrupted bodies are asked again."""

ORACLE = "https://{namespace}.compat.objectstorage.{region}.oraclecloud.com"
"""Oracle's endpoint that speaks S3, with its customer secret keys."""


def connect(address: StoreAddress) -> Connection:
    """A connection whose paths are relative to `address`; nothing is requested yet.

    Raises:
        UnsupportedInput: obstore is not installed, or cannot be used in this process.
        InputRefused: the address or the environment lacks what this store needs.
    """
    require_obstore(address)
    _require_no_fork(address)
    from obstore.exceptions import BaseError  # noqa: PLC0415 - an extra
    from obstore.store import S3Store, from_url  # noqa: PLC0415

    common: dict[str, Any] = {"retry_config": RETRIES}
    try:
        if address.scheme in ("s3", "oci"):
            return S3Store(
                address.bucket.partition("@")[0],
                prefix=address.key or None,
                **_s3_options(address, os.environ),
                **common,
            )
        return from_url(str(address), **common)
    except (BaseError, ValueError) as error:
        raise InputRefused(
            f"cannot connect to `{address}`: {first_line(error)}",
            hint="check the address and the environment variables",
        ) from error


def _require_no_fork(address: StoreAddress) -> None:
    """Refuses a fork of a process that has used obstore, whose threads it does not have: it would wait forever."""
    _users.add(os.getpid())
    if len(_users) > 1:
        raise UnsupportedInput(
            f"`{address}` cannot be opened in a fork of a process that has used an object store",
            hint="start processes by `spawn` or `forkserver`, as `multiprocessing.get_context` does",
        )


_users: set[int] = set()
"""This process, if it has connected to a store, and the one that it was forked from."""


def require_obstore(address: StoreAddress) -> None:
    """Raises UnsupportedInput if obstore is not installed."""
    if find_spec("obstore") is None:
        raise UnsupportedInput(f"`{address}` needs obstore, which is not installed", hint="`pip install obstore`")


def open_uploads(address: StoreAddress, names: Collection[str]) -> tuple[Any, list[dict[str, str]]] | None:
    """A client of boto3, and the multipart uploads of some objects that are neither complete nor aborted.

    Args:
        address: of a folder.
        names: of the objects, below the address.

    Returns:
        The client, and the arguments of its `abort_multipart_upload` for each; None without boto3, and for stores that
        do not speak S3.
    """
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
        endpoint = endpoint or _oracle_endpoint(address, environment)
        options["region"] = environment.get("OCI_REGION") or environment.get("AWS_REGION")
    if endpoint:
        options["endpoint"] = endpoint
        options["client_options"] = {"allow_http": endpoint.startswith("http://")}
    if provider := _profile(environment):
        options["credential_provider"] = provider
    return {name: value for name, value in options.items() if value is not None}


def _oracle_endpoint(address: StoreAddress, environment: Mapping[str, str]) -> str:
    namespace = address.bucket.partition("@")[2] or environment.get("OCI_NAMESPACE", "")
    region = environment.get("OCI_REGION") or environment.get("AWS_REGION", "")
    if not namespace or not region:
        raise InputRefused(
            f"`{address}` lacks its namespace or region",
            hint="write it as `oci://BUCKET@NAMESPACE/FOLDER`, and set OCI_REGION, such as eu-frankfurt-1",
        )
    return ORACLE.format(namespace=namespace, region=region)


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
