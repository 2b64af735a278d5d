"""Which texts are URLs of an object store."""

from __future__ import annotations

import importlib.util

import pytest

from engine_ext.store_urls import is_store_url, is_within, store_url
from tests.support.cases import in_one_test


@in_one_test(
    ("given", "found"),
    [
        ("s3://bucket", "s3://bucket"),
        ("s3://bucket/", "s3://bucket"),
        ("s3://bucket/run-7/log", "s3://bucket/run-7/log"),
        ("gs://bucket/log/", "gs://bucket/log"),
        ("az://container/a b", "az://container/a b"),
    ],
)
def test_a_url_is_normalised(given: str, found: str) -> None:
    assert is_store_url(given)
    assert store_url(given) == found


@in_one_test(
    ("given", "message"),
    [
        ("ftp://host/x", "not the URL of an object store"),
        ("http://host/x", "not the URL of an object store"),
        ("file:///etc", "a folder is its path alone"),
        ("s3://", "not the URL of an object store"),
        ("s3:///x", "not the URL of an object store"),
        ("s3://bucket//x", "not the URL of an object store"),
        ("s3://bucket/a\nb", "cannot be printed"),
        ("s3://key:secret@bucket/x", "credentials and endpoints"),
        ("s3://host:9000/x", "credentials and endpoints"),
        ("s3://bucket/x?versionId=1", "credentials and endpoints"),
        ("s3://bucket/x#y", "credentials and endpoints"),
        ("s3://bucket/../x", "is . or .."),
    ],
)
def test_what_is_no_url_of_a_store_is_refused(given: str, message: str) -> None:
    assert is_store_url(given)
    with pytest.raises(ValueError, match=message):
        store_url(given)


@in_one_test("path", ["/mnt/log", "log", "C:/log", "s3:/x", "", None])
def test_paths_are_no_urls(path: object) -> None:
    assert not is_store_url(path)


def test_the_missing_client_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install obstore, or this package with its"):
        store_url("s3://bucket/x")


def test_what_is_below_a_url() -> None:
    assert is_within("s3://b/log", "s3://b/log")
    assert is_within("s3://b/log/weight_v000001", "s3://b/log")
    assert not is_within("s3://b/log-2", "s3://b/log")
    assert not is_within("s3://b", "s3://b/log")


@in_one_test("url", ["https://user:secret@host/x", "s3://key:secret@bucket//x"])
def test_credentials_are_not_shown(url: str) -> None:
    with pytest.raises(ValueError, match="not the URL") as raised:
        store_url(url)
    assert "secret" not in str(raised.value)
