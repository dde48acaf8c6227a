"""Restore links: under which key a result is kept, and what is chosen."""

from types import SimpleNamespace

from tasks.restores import link_key, select_bundle, verify_selection

PLAN = {"target": 3, "anchor": None}


def key_of(*, flow_run="f1", task="weights", **parameters):
    context = SimpleNamespace(task_run=SimpleNamespace(flow_run_id=flow_run), task=SimpleNamespace(name=task))
    return link_key("link", "plan", "incarnation")(context, {"link": task, "plan": PLAN, **parameters})


def test_the_same_link_on_the_same_runtime_has_the_same_key():
    assert key_of(incarnation="a", runtime=object()) == key_of(incarnation="a", runtime=object())


def test_another_runtime_link_plan_or_flow_run_has_another_key():
    keys = {
        key_of(incarnation="a"),
        key_of(incarnation="b"),
        key_of(incarnation="a", task="ledger"),
        key_of(incarnation="a", plan={"target": 4, "anchor": None}),
        key_of(incarnation="a", flow_run="f2"),
    }
    assert len(keys) == 5


async def test_an_empty_store_has_nothing_to_restore(config, tmp_path):
    selected = await select_bundle.fn(config(store={"url": str(tmp_path)}))
    assert (selected["target"], selected["anchor"], selected["passed_over"]) == (None, None, [])


async def test_the_newest_whole_bundle_is_selected_and_the_damaged_one_passed_over(empty_run):
    whole = empty_run.publish()
    damaged = empty_run.publish(next_batch=1)
    path = empty_run.damage(damaged, "progress")
    selected = await select_bundle.fn(empty_run.config)
    assert selected["target"] == whole.sequence
    [[sequence, reason]] = selected["passed_over"]
    assert sequence == damaged.sequence
    assert path in reason
    verified = await verify_selection.fn(empty_run.config, {"target": whole.sequence, "anchor": None})
    assert verified["rows"] == 0
