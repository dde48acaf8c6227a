"""The demo's report: rewards around the kill, what falls short, the picture."""

from xml.etree import ElementTree

import pytest

from flows.demo_report import PICTURE_FILE, REPORT_FILE, Rewards, rewards_around, shortcomings, write_report

GOOD = {
    "run": "demo",
    "prompts_skipped": 0,
    "pairs_trained_twice": 0,
    "reward_start": 0.3,
    "reward_end": 0.6,
    "siblings_reused": 4,
    "groups_reused": 2,
    "audit_problems": [],
}


def step(number, reward, t):
    return {"t": t, "event": "train_step", "step": number, "rewards_mean": reward}


def test_rewards_are_told_apart_by_the_kill():
    before = [step(n, n / 100, t=float(n)) for n in range(1, 8)]
    restored = {"t": 20.0, "event": "checkpoint_restored", "step": 5}
    after = [step(n, n / 100, t=20.0 + n) for n in range(6, 31)]
    rewards = rewards_around([*before, restored, *after], killed_at=10.0)
    assert rewards.killed_after == 7
    assert rewards.undone == {6: 0.06, 7: 0.07}
    assert list(rewards.effective) == list(range(1, 31))
    assert rewards.start == pytest.approx(0.03)
    assert rewards.at_kill == pytest.approx(0.05)
    assert rewards.end == pytest.approx(0.205)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"prompts_skipped": 2}, "prompts_skipped is 2"),
        ({"pairs_trained_twice": 1}, "pairs_trained_twice is 1"),
        ({"reward_end": 0.45}, "the reward rose by 0.150"),
        ({"siblings_reused": 0}, "no sealed sibling"),
        ({"audit_problems": ["3 groups with two owners"]}, "two owners"),
    ],
)
def test_a_broken_promise_is_a_shortcoming(change, word):
    assert any(word in text for text in shortcomings({**GOOD, **change}))


def test_a_good_report_has_none():
    assert shortcomings(GOOD) == []


def test_report_and_picture_are_written(tmp_path):
    rewards = Rewards(effective={n: n / 10 for n in range(1, 9)}, undone={4: 0.4}, killed_after=4)
    write_report(GOOD, rewards, tmp_path / "new")
    assert '"run": "demo"' in (tmp_path / "new" / REPORT_FILE).read_text()
    assert ElementTree.parse(tmp_path / "new" / PICTURE_FILE).getroot().tag.endswith("svg")
