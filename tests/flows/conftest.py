"""A Prefect API for flows that run in the test process."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect.settings import PREFECT_LOCAL_STORAGE_PATH, PREFECT_LOGGING_TO_API_ENABLED, temporary_settings
from prefect.testing.utilities import prefect_test_harness


@pytest.fixture(scope="session")
def prefect_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A temporary server, started once; yields the folder of its task results."""
    results = tmp_path_factory.mktemp("results")
    settings = {PREFECT_LOCAL_STORAGE_PATH: str(results), PREFECT_LOGGING_TO_API_ENABLED: False}
    with prefect_test_harness(server_startup_timeout=120), temporary_settings(settings):
        yield results
