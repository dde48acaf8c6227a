"""Pruning frees what retention would, only when asked, and never beside a controller that may be live."""

from typing import Any

import pytest

from storage.canonical import sha256
from storage.errors import Fenced, NotFound, RunAlreadyLive
from storage.layout import RunLayout
from storage.manifests import BrokenSlot, Manifest, read_log
from storage.pruning import QUIET_S, plan_prune, prune
from storage.retention import Keep

ONE = Keep(1, 1)


class Aged:
    """A store whose files were all written `age` seconds ago; `before_append` precedes each exclusive file."""

    def __init__(self, store: Any, *, age: float = 2 * QUIET_S) -> None:
        self._store = store
        self.age = age
        self.before_append: Any = lambda: None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def age_s(self, path: str) -> float:
        """What was written just now by whoever measures the clock is new."""
        self._store.age_s(path)
        return 0.0 if path.startswith("probe-") else self.age

    def create_exclusive(self, path: str, data: bytes) -> None:
        self.before_append()
        self._store.create_exclusive(path, data)


def _surplus(run: Any) -> tuple[Manifest, Manifest]:
    old = run.checkpoint(1)
    run.store.write(run.layout.part(sha256(b"debris")), b"debris")
    return old, run.checkpoint(2)


def test_a_plan_names_what_goes_and_why_and_changes_nothing(run: Any) -> None:
    old, _ = _surplus(run)
    before = {path: run.store.read(path) for path in run.store.list("")}
    plan = plan_prune(Aged(run.store), run.layout, keep=ONE, grace_s=0)
    assert plan.retires == (old.sequence,)
    reasons = {file.path: file.reason for file in plan.files}
    assert reasons.pop(run.layout.part(sha256(b"debris"))) == "unreachable"
    assert {entry.path for entry in old.files if entry.role == "weights"} <= reasons.keys()
    assert set(reasons.values()) == {"retired"}
    assert plan.bytes == sum(len(before[file.path]) for file in plan.files)
    assert {path: run.store.read(path) for path in run.store.list("")} == before


def test_applying_does_what_the_plan_says_and_the_next_plan_is_empty(run: Any) -> None:
    _, newest = _surplus(run)
    store = Aged(run.store)
    planned = plan_prune(store, run.layout, keep=ONE, grace_s=0)
    plan, done = prune(store, run.layout, keep=ONE, grace_s=0)
    assert plan == planned
    assert set(done.deleted) == {file.path for file in plan.files}
    assert done.problems == ()
    again, nothing = prune(store, run.layout, keep=ONE, grace_s=0)
    assert (again.retires, again.files, nothing.sequence) == ((), (), None)
    assert run.select().target == newest


def test_what_is_kept_by_default_is_what_the_run_was_configured_to_keep(run: Any) -> None:
    made = [run.checkpoint(step) for step in range(1, 6)]
    plan = plan_prune(run.store, run.layout)
    assert plan.retires == tuple(manifest.sequence for manifest in made[: -run.config.checkpointing.keep])


def test_a_run_that_wrote_lately_is_not_pruned(run: Any) -> None:
    _surplus(run)
    held = run.store.list("")
    assert plan_prune(run.store, run.layout).may_be_live
    with pytest.raises(RunAlreadyLive, match=r"run 'demo' wrote to .* 0 s ago: its controller may be live"):
        prune(run.store, run.layout, keep=ONE, grace_s=0)
    assert run.store.list("") == held


def test_a_trace_that_grows_is_a_sign_of_life(run: Any) -> None:
    _surplus(run)
    assert not plan_prune(Aged(run.store), run.layout).may_be_live
    store = Aged(run.store)
    run.store.write(run.layout.trace("controller"), b"")
    store.age_s = lambda path: 1.0 if "/trace/" in path else 2 * QUIET_S
    assert plan_prune(store, run.layout).may_be_live


def test_a_controller_that_publishes_meanwhile_wins_and_nothing_is_deleted(run: Any) -> None:
    _surplus(run)
    store = Aged(run.store)
    published: list[Manifest] = []
    store.before_append = lambda: None if published else published.append(run.snapshot(buffered=(9,)))
    held = set(run.store.list(""))
    with pytest.raises(RunAlreadyLive, match="a controller published while it was to be pruned"):
        prune(store, run.layout, keep=ONE, grace_s=0)
    assert held <= set(run.store.list(""))
    run.read(run.snapshot(buffered=(9, 10)))


def test_a_controller_that_was_silent_is_fenced_by_taking_over(run: Any) -> None:
    _, newest = _surplus(run)
    prune(run.store, run.layout, keep=ONE, grace_s=0, take_over=True)
    with pytest.raises(Fenced, match="prune-"):
        run.snapshot(buffered=(9,))
    assert run.select().target == newest


def test_beside_an_unreadable_manifest_only_what_is_known_goes(run: Any) -> None:
    old, _ = _surplus(run)
    run.store.write(run.layout.manifest(old.sequence), b"{}")
    assert isinstance(read_log(run.store, run.layout)[old.sequence], BrokenSlot)
    plan = plan_prune(Aged(run.store), run.layout, keep=ONE, grace_s=0)
    assert (plan.retires, plan.files) == ((), ())


@pytest.mark.parametrize("ahead_s", [7200.0, -7200.0])
def test_a_clock_that_differs_from_the_stores_neither_hides_a_live_run_nor_ages_files(run: Any, ahead_s: float) -> None:
    _surplus(run)
    held = run.store.list("")

    class Skewed(Aged):
        def age_s(self, path: str) -> float:
            return float(self._store.age_s(path)) + ahead_s

    with pytest.raises(RunAlreadyLive, match=r" 0 s ago: its controller may be live"):
        prune(Skewed(run.store), run.layout)
    plan, _ = prune(Skewed(run.store), run.layout, take_over=True)
    assert [file for file in plan.files if file.reason == "unreachable"] == []
    assert run.store.list("") == [*held, run.layout.manifest(plan.behind + 1)] if plan.retires else held


def test_an_unknown_run_is_not_pruned(run: Any) -> None:
    with pytest.raises(NotFound, match="holds no run 'nobody'"):
        prune(run.store, RunLayout("nobody"))
