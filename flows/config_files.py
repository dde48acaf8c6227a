"""Configuration files and `--set key=value`: read, overridden, validated, with one clear message for each mistake."""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from flows.home import Home
from storage.errors import ConfigurationError
from storage.run_config import RunConfig, StoreConfig


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The validated configuration in a YAML file, with `section.key=value` overrides applied.

    Raises ConfigurationError that lists every wrong key (with the nearest right one) and value.
    """
    values = _read(path)
    for override in overrides:
        _apply(values, override)
    return resolved(validated(values, origin=str(path)))


def validated(values: Mapping[str, Any], *, origin: str) -> RunConfig:
    """A RunConfig, or a ConfigurationError that names each wrong key with its value."""
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        problems = [_problem(entry) for entry in error.errors()]
        raise ConfigurationError(f"{origin}: {_listed(problems)}") from error


def resolved(config: RunConfig) -> RunConfig:
    """The same configuration with a store URL that means the same in every process.

    An unset `store.url` is the store of this home; another relative path counts from the current folder.
    """
    url = config.store.url
    if url == StoreConfig().url:
        url = str(Home.current().store)
    elif "://" not in url:
        url = str(Path(url).expanduser().resolve())
    return config.model_copy(update={"store": config.store.model_copy(update={"url": url})})


def known_keys() -> list[str]:
    """Every dotted key a configuration may have."""
    return list(_keys(RunConfig, ""))


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text()
    except FileNotFoundError as error:
        raise ConfigurationError(f"{path}: no such file; give the path of a run's YAML file{_examples()}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path}: can't be read ({error})") from error
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{path}: not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise ConfigurationError(f"{path}: holds {type(values).__name__}, expected keys such as 'name: my-run'")
    return values


def _examples() -> str:
    folder = Path("configs")
    found = sorted(str(path) for path in folder.glob("*.yaml")) if folder.is_dir() else []
    return f", for example {', '.join(found)}" if found else ""


def _apply(values: dict[str, Any], override: str) -> None:
    """Set one `section.key=value`; the value is read as YAML."""
    key, separator, text = override.partition("=")
    path = [part.strip() for part in key.split(".")]
    if not separator or not all(path):
        raise ConfigurationError(f"--set {override}: expected key=value, such as algorithm.max_steps=50")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigurationError(f"--set {override}: the value is not valid YAML: {error}") from error
    section = values
    for part in path[:-1]:
        inner = section.setdefault(part, {})
        if not isinstance(inner, dict):
            raise ConfigurationError(f"--set {override}: '{part}' is a value, not a section")
        section = inner
    section[path[-1]] = value


def _problem(entry: Any) -> str:
    path = ".".join(str(part) for part in entry["loc"])
    match entry["type"]:
        case "extra_forbidden":
            return f"unknown key '{path}'{_nearest(path)}"
        case "missing":
            return f"'{path}' is missing"
        case "value_error":
            message = str(entry["msg"]).removeprefix("Value error, ")
            return f"{path}: {message}" if path else message
        case "model_type":
            return f"{path} is {entry['input']!r}: expected a section with keys below it"
        case _:
            return f"{path} is {entry['input']!r}: {_lower_first(entry['msg'])}"


def _nearest(path: str) -> str:
    """A hint at the known key that was probably meant: the same name elsewhere, or a similar one."""
    last = path.rpartition(".")[2]
    known = [key for key in known_keys() if not path.startswith(f"{key}.")]
    sections = [key for key in known if "." not in key]
    same_name = [key for key in known if key.rpartition(".")[2] == last]
    similar = difflib.get_close_matches(path, known, n=1, cutoff=0.6)
    by_name = [k for k in known if difflib.get_close_matches(last, [k.rpartition(".")[2]], cutoff=0.75)]
    chosen = next(iter([*same_name, *similar, *by_name]), None)
    if chosen is not None:
        return f"; did you mean '{chosen}'?"
    parent = path.rpartition(".")[0]
    siblings = [key for key in known if key.rpartition(".")[0] == parent] if parent else sections
    return f"; known here: {', '.join(siblings)}"


def _keys(model: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}"
        section = section_of(field.annotation)
        if section is not None:
            yield from _keys(section, f"{prefix}{name}.")


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The section a field holds, or None for a plain value."""
    candidates = [annotation, *get_args(annotation)]
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)


def _listed(problems: Sequence[str]) -> str:
    return problems[0] if len(problems) == 1 else "".join(f"\n  - {problem}" for problem in problems)


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]
