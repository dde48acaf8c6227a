"""`midflight audit`: a run accounted for, for people and machines; what is wrong is named by its first ids."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey

from flows.audit import audit
from flows.cli import FAILURE, MISTAKE
from storage.errors import BrokenInvariant

Run = Callable[..., tuple[int, str, str]]


def _forget(store: Path, event: str) -> str:
    """Take the first event of a kind from the trace; returns what it was about."""
    (path,) = (store / "demo/trace").glob("*.jsonl")
    lines = path.read_text().splitlines(keepends=True)
    number = next(n for n, line in enumerate(lines) if json.loads(line)["event"] == event)
    gone = json.loads(lines.pop(number))
    path.write_text("".join(lines))
    return str(gone.get("rollout_id") or gone.get("group_id"))


def test_a_run_is_accounted_for_and_nothing_is_written(midflight: Run, store: Path) -> None:
    before = {path: path.read_bytes() for path in store.rglob("*") if path.is_file()}
    code, shown, error = midflight("audit", "demo")
    assert (code, error) == (0, "")
    assert "Broken promises" not in shown
    code, machine, _ = midflight("audit", "demo", "--store", str(store), "--json")
    found = json.loads(machine)
    assert (code, found["run"], found["broken"], found["unproven"]) == (0, "demo", [], [])
    assert found["pairs_trained"] == found["pairs_sealed"] == 10
    assert sum(found["owners"].values()) == found["frontier"] == 12
    assert {path: path.read_bytes() for path in store.rglob("*") if path.is_file()} == before


def test_a_broken_promise_is_named_with_the_first_that_break_it(midflight: Run, store: Path) -> None:
    rollout = _forget(store, "attempt_sealed")
    code, shown, error = midflight("audit", "demo")
    assert code == FAILURE
    assert "Broken promises" in shown
    assert f"1 published rollouts without a traced result: {rollout}" in error
    code, machine, _ = midflight("audit", "demo", "--json")
    assert code == FAILURE
    assert {finding["what"]: finding["ids"] for finding in json.loads(machine)["broken"]} == {
        "published rollouts without a traced result": [rollout],
        "trained rollouts that were never sealed": [rollout],
    }


def test_what_can_be_no_run_is_a_mistake(midflight: Run) -> None:
    code, _, error = midflight("audit", "../store")
    assert code == MISTAKE
    assert "is no name of a run" in error


@pytest.mark.system
@pytest.mark.usefixtures("prefect_api")
async def test_the_flow_leaves_a_table_and_fails_with_what_is_wrong(store: Path) -> None:
    found = await audit("demo")
    assert (found["broken"], found["frontier"]) == ([], 12)
    group = _forget(store, "group_reserved")
    with pytest.raises(BrokenInvariant, match=f"groups without a traced reservation: {group}"):
        await audit("demo", store_url=str(store))
    async with get_client() as client:
        key = ArtifactFilter(key=ArtifactFilterKey(any_=["audit-demo"]))
        tables = sorted(await client.read_artifacts(artifact_filter=key), key=lambda artifact: artifact.created)
    assert group not in str(tables[-2].data)
    assert group in str(tables[-1].data)
