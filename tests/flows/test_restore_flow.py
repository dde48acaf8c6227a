"""The restore chain under retries from the UI: Prefect's engine, a runtime in memory, a real (empty) store."""

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.flow_engine import run_flow_async
from prefect.states import AwaitingRetry, Pending

from flows.restore import restore_run
from storage.errors import BrokenInvariant, NoRestorableState, StoreUnavailable
from storage.run_config import RunConfig
from tasks.restores import LIVE_LINKS

pytestmark = [pytest.mark.system, pytest.mark.usefixtures("prefect_api")]

ALL_LINKS = [f"link {link}" for link in LIVE_LINKS]


async def nobody_is_gone(_driver: str) -> bool:
    return False


class Chain:
    """One flow run of the chain, as the UI sees it: run, then retried."""

    def __init__(self, runtime, store_url):
        config = RunConfig.model_validate({"name": "run", "store": {"url": store_url}})

        @flow(name="restore-under-test")
        async def under_test():
            return await restore_run(config, runtime, driver="me", owner_is_gone=nobody_is_gone)

        self._flow = under_test
        self._runtime = runtime

    async def start(self):
        async with get_client() as client:
            self._run = await client.create_flow_run(self._flow, state=Pending())
        return await self._execute()

    async def press_retry(self):
        async with get_client() as client:
            await client.set_flow_run_state(self._run.id, AwaitingRetry(), force=True)
            self._run = await client.read_flow_run(self._run.id)
        return await self._execute()

    async def _execute(self):
        """Links that ran this time, and the error or None."""
        self._runtime.calls.clear()
        try:
            await run_flow_async(self._flow, flow_run=self._run, parameters={})
            error = None
        except Exception as raised:  # noqa: BLE001 - the test looks at it
            error = raised
        return [call for call in self._runtime.calls if call.startswith("link")], error


@pytest.fixture
def chain(fake_runtime, tmp_path):
    return Chain(fake_runtime, str(tmp_path))


async def test_all_links_run_once_in_their_order(chain, fake_runtime):
    links, error = await chain.start()
    assert (links, error) == (ALL_LINKS, None)
    assert fake_runtime.live["state"] == "running"


async def test_a_retry_goes_on_at_the_failed_link_while_the_runtime_lives(chain, fake_runtime):
    fake_runtime.fail("link ledger", BrokenInvariant("digest"))
    links, error = await chain.start()
    assert links == ALL_LINKS[:3]
    assert isinstance(error, BrokenInvariant)
    links, error = await chain.press_retry()
    assert (links, error) == (ALL_LINKS[2:], None)


async def test_a_retry_on_a_new_runtime_starts_the_live_links_again(chain, fake_runtime):
    fake_runtime.fail("link ledger", BrokenInvariant("digest"))
    await chain.start()
    fake_runtime.live = None
    links, error = await chain.press_retry()
    assert (links, error) == (ALL_LINKS, None)


async def test_trouble_with_the_store_is_retried_without_a_person(chain, fake_runtime):
    fake_runtime.fail("link weights", StoreUnavailable("no answer"))
    links, error = await chain.start()
    assert (links, error) == ([ALL_LINKS[0], *ALL_LINKS], None)


async def test_a_run_that_runs_already_is_left_alone(chain, fake_runtime):
    fake_runtime.start()
    assert await chain.start() == ([], None)


async def test_without_a_whole_bundle_nothing_of_the_runtime_is_touched(fake_runtime, empty_store_with_a_damaged_run):
    links, error = await Chain(fake_runtime, empty_store_with_a_damaged_run).start()
    assert links == []
    assert isinstance(error, NoRestorableState)


@pytest.fixture
def empty_store_with_a_damaged_run(tmp_path):
    from storage.filesystem import open_store
    from storage.layout import RunLayout
    from storage.manifests import ManifestLog

    store, layout = open_store(str(tmp_path)), RunLayout("run")
    ManifestLog(store, layout, "writer").claim()
    store.write(layout.manifest(1), b"not a manifest")
    return str(tmp_path)
