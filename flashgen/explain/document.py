"""Accounts as JSON and back."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from flashgen.explain.account import Account
from flashgen.explain.cached import CacheAccount
from flashgen.explain.linear import LinearAccount
from flashgen.explain.packed import PackedAccount
from flashgen.version import __version__

#: The version of the fields and their meaning; a change that concerns readers increments it.
SCHEMA = 1


def to_json(
    accounts: Iterable[Any],
    form: str = "dense",
) -> str:
    """Accounts of one form: the fields of their class, `Account` for one.

    ``{"schema": 1, "flashgen": version, "form": "dense", "accounts": [...]}``
    """
    document = {
        "schema": SCHEMA,
        "flashgen": __version__,
        "form": form,
        "accounts": [asdict(account) for account in accounts],
    }
    return json.dumps(document, indent=1) + "\n"


def from_json(text: str) -> list[Account]:
    """The accounts of the dense form that `to_json` wrote.

    Raises:
        ValueError: the schema or the form differs, or a value does not have its field's type.
    """
    return [_read(Account, fields) for fields in _accounts(text, "dense")]


def cached_from_json(text: str) -> list[CacheAccount]:
    """The accounts of the cache form that `to_json` wrote.

    Raises:
        ValueError: as of `from_json`.
    """
    return [_read(CacheAccount, fields) for fields in _accounts(text, "cache")]


def packed_from_json(text: str) -> list[PackedAccount]:
    """The accounts of packed sequences that `to_json` wrote.

    Raises:
        ValueError: as of `from_json`.
    """
    return [_read(PackedAccount, fields) for fields in _accounts(text, "varlen")]


def linear_from_json(text: str) -> list[LinearAccount]:
    """The accounts of linear attention that `to_json` wrote.

    Raises:
        ValueError: as of `from_json`.
    """
    return [_read(LinearAccount, fields) for fields in _accounts(text, "linear")]


def _accounts(text: str, form: str) -> list[Any]:
    document = json.loads(text)
    if document["schema"] != SCHEMA:
        raise ValueError(f"schema {document['schema']}, not {SCHEMA}")
    if document.get("form", "dense") != form:
        raise ValueError(f"accounts of the form {document['form']!r}, not of {form!r}")
    accounts: list[Any] = document["accounts"]
    return accounts


def _read(kind: Any, value: Any) -> Any:
    """A value of JSON, converted to a field's type."""
    origin, arguments = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        if set(value) != {field.name for field in fields(kind)}:
            raise ValueError(f"not the fields of {kind}: {', '.join(value)}")
        return kind(**{name: _read(hints[name], part) for name, part in value.items()})  # type: ignore[operator]
    if origin is UnionType:
        [present] = set(arguments) - {NoneType}
        return None if value is None else _read(present, value)
    if origin is dict:
        return {name: _read(arguments[1], part) for name, part in value.items()}
    if origin is tuple:
        parts = arguments[:1] * len(value) if arguments[1:] == (...,) else arguments
        return tuple(_read(part, item) for part, item in zip(parts, value, strict=True))
    if type(value) is not kind:
        raise ValueError(f"{value!r} is no {kind.__name__}")
    return value
