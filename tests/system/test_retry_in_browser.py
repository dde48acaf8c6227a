"""A restore that failed because the store was down is retried with the button of Prefect's UI, in a real browser."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, Route, sync_playwright
from s3fs import S3FileSystem

from storage.filesystem import open_store
from storage.layout import RunLayout
from storage.trace_reader import read_events
from tests.system.gated_s3 import BUCKET, GatedS3
from tests.system.prefect_api import PrefectApi

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

CHROMIUM = "/usr/bin/chromium"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
DEADLINE_S = 120
SCREENSHOTS = Path(__file__).resolve().parents[2] / "build" / "screenshots"
LINKS = ["select", "verify", "plan", "weights", "replay_buffer", "ledger", "spare_prompts", "cursor", "redispatch"]


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[GatedS3]:
    server = GatedS3()
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    S3FileSystem.clear_instance_cache()  # one that was made for another endpoint would be used again
    yield server
    S3FileSystem.clear_instance_cache()
    server.stop()


@pytest.fixture
def page() -> Iterator[Page]:
    """A browser that reaches this machine only."""

    def loopback_only(route: Route) -> None:
        if "//127.0.0.1:" in route.request.url:
            route.continue_()
        else:
            route.abort()

    if not Path(CHROMIUM).exists():
        pytest.fail(f"{CHROMIUM} is missing: install Debian's package chromium (`make test` does it as root)")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_page(viewport={"width": 1400, "height": 1000})
        page.route("**/*", loopback_only)
        yield page
        browser.close()


def test_a_failed_restore_is_retried_in_the_ui_and_training_goes_on(new_home, train_command, wait_until, s3, page):
    midflight = new_home()
    assert midflight.run("up").code == 0
    prefect = PrefectApi(midflight.state().prefect_api_url)
    settings = {"store__url": f"s3://{BUCKET}/runs", "store__deadline_s": 5, "checkpointing__save_period": 2}
    first = midflight.run(*train_command("s3", {**settings, "algorithm__max_steps": 3}))
    assert first.code == 0, first.text

    # Chosen and planned by the command, chosen, verified and planned by the flow, then read by the controller.
    s3.close_at_read("/state/", 6)
    failed = midflight.run(*train_command("s3", {**settings, "algorithm__max_steps": 6}))
    assert not s3.is_open, failed.text
    assert failed.code == 1, failed.text
    assert "did not restore s3" in failed.text
    assert "StoreUnavailable" in failed.text
    restore = next(run for run in prefect.flow_runs("restore-s3") if run["state_name"] == "Failed")
    train = next(run for run in prefect.flow_runs("train-s3") if run["state_name"] == "Failed")
    # The server records task runs a moment after the flow run has ended.
    wait_until(lambda: "Failed" in link_states(prefect, restore["id"]).get(1, {}).values(), seconds=DEADLINE_S)
    links = link_states(prefect, restore["id"])[1]
    failed_link = next(link for link in LINKS if links[link] == "Failed")
    done = LINKS[: LINKS.index(failed_link)]
    assert {"select", "verify", "plan"} <= set(done)
    assert links == {**dict.fromkeys(done, "Completed"), failed_link: "Failed"}

    s3.open()
    press_retry(page, midflight.state().prefect_api_url.removesuffix("/api"), restore["id"])
    wait_until(lambda: prefect.state(restore["id"]) == "Completed", seconds=DEADLINE_S)
    expected = {**dict.fromkeys(done, "Cached"), **dict.fromkeys(LINKS[len(done) :], "Completed")}
    wait_until(lambda: link_states(prefect, restore["id"]).get(2) == expected, seconds=DEADLINE_S)
    wait_until(lambda: prefect.state(train["id"]) == "Completed", seconds=DEADLINE_S)
    page.reload()
    page.wait_for_load_state("networkidle")
    page.screenshot(path=SCREENSHOTS / "restore-retried.png")

    events = read_events(open_store(settings["store__url"]), RunLayout("s3"))
    assert [int(e["step"]) for e in events if e["event"] == "train_step"] == [1, 2, 3, 4, 5, 6]
    lives = [e["run_process"] for e in events if e["event"] == "run_started"]
    assert len(lives) == 2, "the retried restore filled the runtime that its first try had left"


def link_states(prefect: PrefectApi, flow_run_id: str) -> dict[int, dict[str, str]]:
    """State of each link by try: `{1: {"select": "Completed", ...}, 2: ...}`."""
    states: dict[int, dict[str, str]] = {}
    for task_run in prefect.task_runs(flow_run_id):
        if task_run["name"] in LINKS:
            states.setdefault(task_run["flow_run_run_count"], {})[task_run["name"]] = task_run["state_name"]
    return states


def press_retry(page: Page, ui: str, flow_run_id: str) -> None:
    """Open the flow run's page, press Retry there and in the dialog, and wait until the server has taken it."""
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.context.add_cookies([{"name": "prefect_ui_version", "value": "v1", "url": ui}])
    page.goto(f"{ui}/runs/flow-run/{flow_run_id}")
    page.get_by_role("button", name="Retry", exact=True).wait_for()
    page.screenshot(path=SCREENSHOTS / "restore-failed.png")
    page.get_by_role("button", name="Retry", exact=True).click()
    confirm = page.locator(".p-modal").get_by_role("button", name="Retry", exact=True)
    confirm.wait_for()
    page.screenshot(path=SCREENSHOTS / "retry-dialog.png")
    with page.expect_response(lambda response: response.url.endswith("/set_state")) as answer:
        confirm.click()
    assert answer.value.ok
