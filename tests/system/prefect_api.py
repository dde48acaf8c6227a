"""Prefect's REST API, as its UI uses it."""

import json
import urllib.request
from typing import Any


class PrefectApi:
    """Reads of a local server."""

    def __init__(self, api_url: str) -> None:
        self._api_url = api_url

    def flow_runs(self, name: str) -> list[dict[str, Any]]:
        """Flow runs of this name, the oldest first."""
        body = {"flow_runs": {"name": {"any_": [name]}}, "sort": "EXPECTED_START_TIME_ASC"}
        found: list[dict[str, Any]] = self._post("flow_runs/filter", body)
        return found

    def state(self, flow_run_id: str) -> str:
        """Name of a flow run's state."""
        found = self._post("flow_runs/filter", {"flow_runs": {"id": {"any_": [flow_run_id]}}})
        return str(found[0]["state_name"])

    def deployments(self) -> set[str]:
        """Names of the deployments."""
        return {deployment["name"] for deployment in self._post("deployments/filter", {})}

    def automations(self) -> set[str]:
        """Names of the automations."""
        return {automation["name"] for automation in self._post("automations/filter", {})}

    def task_runs(self, flow_run_id: str) -> list[dict[str, Any]]:
        """Task runs of a flow run, of all its tries, the oldest first."""
        body = {"flow_runs": {"id": {"any_": [flow_run_id]}}, "sort": "EXPECTED_START_TIME_ASC"}
        found: list[dict[str, Any]] = self._post("task_runs/filter", body)
        return found

    def _post(self, path: str, body: Any) -> Any:
        request = urllib.request.Request(
            f"{self._api_url}/{path}", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=30) as answer:
            return json.load(answer)
