"""The trace of all lives as evidence: what one life, or one bundle, should have behind it."""

from collections.abc import Iterable, Iterator

from storage.audit_findings import Needs, Suspicion
from storage.bundle_checks import bundle_suspicions
from storage.continued_calls import ContinuedCalls
from storage.history import COPY_PREFIX, History, Life, Segment, cut_time_of
from storage.life_checks import LifeEvents, life_suspicions
from storage.manifests import Manifest
from storage.snapshot_reader import RestoredBundle
from storage.trace_index import TraceIndex


class Evidence:
    """Suspicions come with whether the trace is whole enough to prove them."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._continued = ContinuedCalls()
        self._index = {life.run_process: TraceIndex.of_events(life.events) for life in history.lives}

    def of_lives(self) -> Iterator[tuple[Suspicion, bool]]:
        """What is wrong within each life. A fork's copy is none: it leaves out most of what happened."""
        for life in self._history.lives:
            if not life.is_copy:
                yield from self._judged(life, self._history.below(life), life_suspicions(self._events_of(life)))

    def of_bundle(self, bundle: RestoredBundle) -> Iterator[tuple[Suspicion, bool]]:
        """What a bundle holds that the trace does not say, or that one before it contradicts: ask in their order."""
        life = self._history.writer_of(bundle.manifest)
        if life is None:
            # Nothing has happened yet, or (a fork's copy) nothing that is copied.
            state = bundle.state
            holds = state.progress.train_steps or state.ledger or state.buffer or state.dropped
            if holds and not bundle.manifest.writer.startswith(COPY_PREFIX):
                yield Suspicion("bundles of processes without a trace", f"{bundle.manifest.sequence:08d}"), True
            return
        segments = [Segment(life, cut_time_of(bundle.manifest)), *self._history.below(life)]
        yield from self._judged(life, segments, bundle_suspicions(bundle, self._events_of(life), segments))
        continued = self._continued.suspicions(bundle, segments, self._index_of(segments))
        yield from self._judged(life, segments, continued)

    @property
    def calls_compared(self) -> int:
        """Running calls of bundles that were found again in later ones."""
        return self._continued.compared

    def is_whole_up_to(self, bundle: Manifest) -> bool:
        """Whether nothing that led to a bundle can be missing from the trace."""
        life = self._history.writer_of(bundle)
        segments = [] if life is None else [Segment(life, cut_time_of(bundle)), *self._history.below(life)]
        return all(segment.is_whole for segment in segments)

    def is_whole_for_replays(self) -> bool:
        """Whether the trace surely holds every batch that was to be trained again."""
        return all(segment.is_whole for life in self._history.lives for segment in self._history.below(life))

    def unsealed(self, rollouts: Iterable[str]) -> Iterator[tuple[Suspicion, bool]]:
        """Those of the rollouts that the newest life and those below it trained, whose results they do not hold."""
        if not self._history.lives:
            return
        life = self._history.lives[-1]
        below = self._history.below(life)
        events = self._events_of(life)
        missing = (rollout for rollout in rollouts if not events.was_sealed(rollout))
        what = "trained rollouts that were never sealed"
        yield from self._judged(life, below, (Suspicion(what, rollout, Needs.BELOW) for rollout in missing))

    def _events_of(self, life: Life) -> LifeEvents:
        below = self._index_of(self._history.below(life))
        return LifeEvents(life, self._index[life.run_process], below, self._history.is_of_fork)

    def _index_of(self, segments: Iterable[Segment]) -> TraceIndex:
        return TraceIndex().over(*(self._index[segment.life.run_process] for segment in segments))

    def _judged(
        self, life: Life, segments: Iterable[Segment], suspicions: Iterable[Suspicion]
    ) -> Iterator[tuple[Suspicion, bool]]:
        own = life.has_all_events
        all_whole = own and all(segment.is_whole for segment in segments)
        proven = {Needs.NOTHING: True, Needs.OWN: own, Needs.BELOW: all_whole}
        for suspicion in suspicions:
            yield suspicion, proven[suspicion.needs]
