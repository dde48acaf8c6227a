"""What makes a run the run it is: its configuration without secrets and operational keys."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from storage.canonical import canonical_json, sha256
from storage.run_config import RunConfig

_SECRET_NAME = re.compile(r"(^|_)(token|key|secret|password|passwd|credential)s?$", re.IGNORECASE)
_USER_INFO = re.compile(r"(?<=://)[^/@\s]+@")
_REDACTED = "<redacted>"

# What may change between two processes of one run: where and how it operates, not what it computes.
_OPERATIONAL_SECTIONS = frozenset({"name", "store", "cluster", "environment", "rollout_checkpointing", "checkpointing"})
_OPERATIONAL_KEYS = frozenset(
    {
        "algorithm.max_steps",
        "async_rl.finalizer_workers",
        "async_rl.max_consecutive_dropped_prompts",
        "async_rl.max_infrastructure_failures",
        "async_rl.max_interrupted_attempts",
        "async_rl.max_skipped_prompts",
        "async_rl.min_groups_for_streaming_train",
        "async_rl.on_stall",
        "async_rl.retry_backoff_s",
        "async_rl.retry_backoff_max_s",
        "async_rl.rollout_timeout_s",
        "async_rl.stall_timeout_s",
        "generation.max_generator_restarts",
        "generation.num_engines",
        "generation.kv_cache_bytes",
        "generation.gpu_memory_utilization",
        "generation.max_inflight_groups",
        "generation.max_num_seqs",
        "generation.tensor_parallel_size",
        "rollout_recovery.peek_deadline_s",
        "rollout_recovery.peek_interval_s",
    }
)


@dataclass(frozen=True, slots=True)
class Identity:
    """`fingerprint`: sha256 of `config`, which is the redacted configuration minus operational keys."""

    fingerprint: str
    config: dict[str, Any]


def redacted(config: RunConfig) -> dict[str, Any]:
    """The whole configuration as plain JSON; strings named like a secret and users in URLs are replaced."""
    return {key: _redact(key, value) for key, value in config.model_dump(mode="json").items()}


def identity(config: RunConfig) -> Identity:
    """The identity of a run with this configuration."""
    return identity_of(redacted(config))


def identity_of(redacted_config: Mapping[str, Any]) -> Identity:
    """The identity of a redacted configuration, as manifests hold it."""
    kept = {
        section: _without_operational(section, value)
        for section, value in redacted_config.items()
        if section not in _OPERATIONAL_SECTIONS
    }
    return Identity(sha256(canonical_json(kept)), kept)


def with_defaults(redacted_config: Mapping[str, Any]) -> dict[str, Any]:
    """A redacted configuration that another version of Midflight has saved, with the keys that it did not know yet.

    They get their defaults: a new key's default is what earlier versions did. Keys that exist no more stay.
    """
    return _with_defaults(RunConfig, redacted_config)


def _with_defaults(model: type[BaseModel], saved: Mapping[str, Any]) -> dict[str, Any]:
    filled = dict(saved)
    for name, field in model.model_fields.items():
        section = _section_of(field.annotation)
        if name in saved:
            if section is not None and isinstance(saved[name], Mapping):
                filled[name] = _with_defaults(section, saved[name])
        elif not field.is_required():
            filled[name] = to_jsonable_python(field.get_default(call_default_factory=True))
    return filled


def _section_of(annotation: Any) -> type[BaseModel] | None:
    candidates = (annotation, *get_args(annotation))
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)


def differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Dotted paths whose values differ, each with both values, sorted by path."""
    before, now = dict(_leaves(saved, "")), dict(_leaves(current, ""))
    missing = object()
    return [
        f"{path}: saved {_shown(before, path)}, now {_shown(now, path)}"
        for path in sorted(before.keys() | now.keys())
        if before.get(path, missing) != now.get(path, missing)
    ]


def _without_operational(section: str, value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {key: inner for key, inner in value.items() if f"{section}.{key}" not in _OPERATIONAL_KEYS}


def _redact(key: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return {inner: _redact(inner, item) for inner, item in value.items()}
    if isinstance(value, list | tuple):
        return [_redact(key, item) for item in value]
    if isinstance(value, str):
        return _REDACTED if _SECRET_NAME.search(key) else _USER_INFO.sub(f"{_REDACTED}@", value)
    return value


def _leaves(value: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, inner in value.items():
        path = f"{prefix}{key}"
        if isinstance(inner, Mapping) and inner:
            yield from _leaves(inner, f"{path}.")
        else:
            yield path, list(inner) if isinstance(inner, tuple) else inner


def _shown(leaves: Mapping[str, Any], path: str) -> str:
    return repr(leaves[path]) if path in leaves else "absent"
