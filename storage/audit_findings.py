"""What an audit finds: broken promises, and what a trace with a gap can't prove."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

_SHOWN = 10


class Needs(StrEnum):
    """Which part of the trace must be whole for a finding to be a fault."""

    NOTHING = "nothing"  # what is there contradicts itself
    OWN = "own"  # the life's own events
    BELOW = "below"  # also those of the lives that it stands on


@dataclass(frozen=True, slots=True)
class Suspicion:
    """One thing that is not as promised, unless the trace has lost what it `needs`."""

    what: str
    about: str
    needs: Needs = Needs.NOTHING


@dataclass(frozen=True, slots=True)
class Finding:
    """One broken promise and all that break it, in the order in which they were found."""

    what: str
    ids: tuple[str, ...]

    def __str__(self) -> str:
        """Number, promise and the first ids."""
        more = " ..." if len(self.ids) > _SHOWN else ""
        return f"{len(self.ids)} {self.what}: {', '.join(self.ids[:_SHOWN])}{more}"


def findings(suspicions: Iterable[Suspicion]) -> tuple[Finding, ...]:
    """The suspicions by promise; what several lives or bundles show of one thing counts once."""
    found: dict[str, dict[str, None]] = {}
    for suspicion in suspicions:
        found.setdefault(suspicion.what, {})[suspicion.about] = None
    return tuple(Finding(what, tuple(ids)) for what, ids in found.items())


def named(what: Mapping[str, Iterable[object]]) -> Iterator[Finding]:
    """Findings from ids by promise; what is kept leaves nothing."""
    for promise, ids in what.items():
        if listed := tuple(str(name) for name in ids):
            yield Finding(promise, listed)
