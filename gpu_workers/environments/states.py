"""States of environments as plain JSON: what is refused, and the one spelling that is saved and hashed."""

import math
from typing import Any

from gpu_workers.environments.interface import Json
from storage.canonical import canonical_json, sha256
from storage.errors import DataFailure


def require_plain_json(value: Any, where: str) -> None:
    """Refuse what JSON would change or lose: tuples, sets, NaN, keys that aren't strings, any other object.

    Raises DataFailure, which names the place inside of `where` and the type.
    """
    match value:
        case None | bool() | str() | int() | float() if type(value) in _SCALARS:
            if isinstance(value, float) and not math.isfinite(value):
                raise DataFailure(f"{where} is {value!r}, which JSON can't hold; use None or a string")
            if isinstance(value, str):
                _require_text(value, where)
        case list() if type(value) is list:
            for place, item in enumerate(value):
                require_plain_json(item, f"{where}[{place}]")
        case dict() if type(value) is dict:
            for key, item in value.items():
                if type(key) is not str:
                    raise DataFailure(
                        f"{where} has the key {key!r} of type {_type_name(key)}, but JSON's keys are strings; "
                        f"use {str(key)!r}"
                    )
                _require_text(key, where)
                require_plain_json(item, f"{where}.{key}")
        case _:
            raise DataFailure(
                f"{where} is of type {_type_name(value)}, which is not plain JSON{_instead(value)}; "
                "a state holds only dict, list, str, int, float, bool and None"
            )


def canonical_state(state: Json, *, where: str) -> str:
    """The state as compact JSON with sorted keys; `where` names it in the DataFailure of a state that isn't plain."""
    if type(state) is not dict:
        raise DataFailure(f"{where} is of type {_type_name(state)}; an environment's state is a dict")
    require_plain_json(state, where)
    return canonical_json(state).decode()


def digest_of(text: str) -> str:
    """sha256 (hex) of a text in UTF-8."""
    return sha256(text.encode())


_SCALARS = frozenset({type(None), bool, str, int, float})


def _require_text(text: str, where: str) -> None:
    """A lone surrogate has no UTF-8 spelling."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataFailure(f"{where} has the text {text!r}, which is not valid Unicode") from error


def _instead(value: Any) -> str:
    if isinstance(value, tuple | set | frozenset):
        return " (use a list)"
    if hasattr(value, "tolist"):  # numpy's scalars and arrays
        return " (use .tolist())"
    return ""


def _type_name(value: object) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
