"""Events of lives by kind and by what they are about: a group, a rollout or a train step."""

from collections.abc import Iterable, Iterator, Sequence

from storage.history import Event

DROPS = ("prompt_dropped", "group_discarded")
STARTS = ("attempt_dispatched", "attempt_resumed")

_Layer = dict[str, dict[str, list[Event]]]


class TraceIndex:
    """Looks events up, those of one life after those of another. Their order within a life is that of the trace."""

    def __init__(self, layers: Sequence[_Layer] = ()) -> None:
        self._layers = tuple(layers)

    @classmethod
    def of_events(cls, events: Iterable[Event]) -> "TraceIndex":
        """The events of one life."""
        layer: _Layer = {}
        for event in events:
            about = next((str(event[name]) for name in ("rollout_id", "group_id", "step") if name in event), "")
            layer.setdefault(event["event"], {}).setdefault(about, []).append(event)
        return cls([layer])

    def over(self, *others: "TraceIndex") -> "TraceIndex":
        """These events and those of others."""
        return TraceIndex([*self._layers, *(layer for other in others for layer in other._layers)])

    def of(self, about: str, *kinds: str) -> list[Event]:
        """The events of these kinds about one thing."""
        return [event for layer in self._layers for kind in kinds for event in layer.get(kind, {}).get(about, ())]

    def has(self, about: str, *kinds: str) -> bool:
        """Whether there is such an event."""
        return any(about in layer.get(kind, {}) for layer in self._layers for kind in kinds)

    def about(self, *kinds: str) -> Iterator[str]:
        """What events of these kinds are about, each once."""
        yield from dict.fromkeys(about for layer in self._layers for kind in kinds for about in layer.get(kind, {}))

    def all(self, *kinds: str) -> Iterator[Event]:
        """Every event of these kinds."""
        for about in self.about(*kinds):
            yield from self.of(about, *kinds)


def group_of(rollout: str) -> str:
    """The group that a rollout id belongs to; empty for what is none."""
    return rollout.rpartition("_g")[0]
