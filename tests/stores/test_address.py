"""Addresses in object stores."""

from __future__ import annotations

import pytest

from llmconv.addresses import StoreAddress, is_store_address, parse_address
from llmconv.errors import InputRefused


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("s3://bucket/a/b", StoreAddress("s3", "bucket", "a/b")),
        ("s3a://bucket/a/", StoreAddress("s3", "bucket", "a")),
        ("gcs://bucket", StoreAddress("gs", "bucket", "")),
        ("az://container/a", StoreAddress("az", "container", "a")),
        ("abfss://container@account.dfs.core.windows.net/a", None),
        ("oci://bucket@namespace/a", StoreAddress("oci", "bucket@namespace", "a")),
    ],
)
def test_an_address_has_a_scheme_a_bucket_and_a_path(text: str, address: StoreAddress | None) -> None:
    found = parse_address(text)
    assert found == (address or StoreAddress("abfss", "container@account.dfs.core.windows.net", "a"))
    assert parse_address(str(found)) == found


@pytest.mark.parametrize("text", ["a/b", "/a", "C:/x", "hf://org/name", "file:///x", "s3:/bucket/x", "http://host/x"])
def test_other_texts_are_no_addresses_in_a_store(text: str) -> None:
    assert not is_store_address(text)


@pytest.mark.parametrize(
    "text", ["s3://key:secret@bucket/a", "s3://bucket/a?sig=secret", "gs://me@bucket/a", "s3://b#c"]
)
def test_credentials_in_an_address_are_refused_and_not_shown(text: str) -> None:
    with pytest.raises(InputRefused) as caught:
        parse_address(text)
    assert "secret" not in caught.value.message.replace("credentials", "") + caught.value.hint.replace("SECRET", "")


@pytest.mark.parametrize("sign", ["#", "?"])
def test_a_path_that_looks_like_a_query_is_not_taken_for_credentials(sign: str) -> None:
    with pytest.raises(InputRefused, match=f"no path with `[{sign}]` can be given") as caught:
        parse_address(f"s3://bucket/runs/a+b {sign}1 100%/")
    assert "copy what is there to another path" in caught.value.hint


@pytest.mark.parametrize("text", ["s3://", "s3:///a", "s3://bucket/../a", "s3://bucket/a//b", "s3://bucket/a\nb"])
def test_an_address_without_bucket_or_with_an_odd_path_is_refused(text: str) -> None:
    with pytest.raises(InputRefused):
        parse_address(text)


@pytest.mark.parametrize(
    ("text", "around", "expected"),
    [
        ("s3://bucket/a", "s3a://bucket/a/", True),
        ("s3://bucket/a/b", "s3://bucket", True),
        ("s3://bucket/ab", "s3://bucket/a", False),
        ("s3://bucket/a", "gs://bucket/a", False),
        ("az://box/a/b", "abfss://box@account.dfs.core.windows.net/a", True),
        ("oci://bucket@namespace/a", "s3://bucket/a", True),
    ],
)
def test_an_address_is_within_another_by_whatever_name(text: str, around: str, expected: bool) -> None:
    assert parse_address(text).is_within(parse_address(around)) is expected


def test_parts_of_an_address_are_named_as_those_of_a_path() -> None:
    address = StoreAddress("s3", "bucket", "a/b")
    assert (address.name, str(address.parent), str(address / "c")) == ("b", "s3://bucket/a", "s3://bucket/a/b/c")
