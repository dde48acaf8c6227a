"""Whose fault a failure is, how many a sibling survives, and when a run has given up too much."""

import math

from storage.errors import BatchIncomplete, DataFailure, InfrastructureFailure, MidflightError, RolloutFailure
from storage.records import Sibling
from storage.run_config import RunConfig

_TRANSIENT_STATUS = frozenset({408, 429})
# Clients of services and of workers have classes of their own, which need not be installed here to be recognized.
_INFRASTRUCTURE_CLASSES = frozenset(
    {
        "APIConnectionError",  # openai
        "ClientConnectionError",  # aiohttp
        "EngineDeadError",  # vLLM
        "EngineGenerateError",
        "HTTPConnectionError",  # botocore
        "IncompleteRead",  # http.client
        "NodeDiedError",  # Ray
        "ObjectLostError",
        "RayActorError",
        "RequestException",  # requests; its HTTPError has a status
        "TransportError",  # httpx
        "WorkerCrashedError",
    }
)


def is_infrastructure(error: BaseException) -> bool:
    """Whether a worker, a connection or a deadline is to blame, and not the prompt.

    True for time-outs, connection errors, HTTP 5xx, 408 and 429, dead workers, and what Midflight itself calls
    retryable. Everything else is the prompt's: data. An error raised `from` another one counts as that one, unless it
    says more itself.
    """
    if isinstance(error, MidflightError):
        return error.retryable
    status = _http_status(error)
    if status is not None:
        return status >= 500 or status in _TRANSIENT_STATUS
    if isinstance(error, TimeoutError | ConnectionError | EOFError):
        return True
    if any(base.__name__ in _INFRASTRUCTURE_CLASSES for base in type(error).__mro__):
        return True
    return error.__cause__ is not None and is_infrastructure(error.__cause__)


def _http_status(error: BaseException) -> int | None:
    """The HTTP status an error carries, under the names that clients give it, on itself or on its response."""
    for holder in (error, getattr(error, "response", None)):
        for name in ("status_code", "status", "code"):
            status = getattr(holder, name, None)
            if isinstance(status, int) and 100 <= status <= 599:
                return status
    return None


class FailurePolicy:
    """The budgets of a sibling (infrastructure, data, interruptions), those of the run, and the smallest step."""

    def __init__(self, config: RunConfig) -> None:
        self._limits = config.async_rl
        self._step_size = config.algorithm.num_prompts_per_step

    def is_spent(self, sibling: Sibling) -> bool:
        """Whether the sibling has failed, or was interrupted, more often than it may."""
        return (
            self.is_data_spent(sibling)
            or sibling.infrastructure_failures > self._limits.max_infrastructure_failures
            or sibling.interruptions > self._limits.max_interrupted_attempts
        )

    def is_data_spent(self, sibling: Sibling) -> bool:
        """Whether it is the budget of data failures that is spent."""
        return sibling.data_failures > self._limits.max_data_failures

    def is_suspect(self, sibling: Sibling, *, saw_worker_die: bool) -> bool:
        """Whether the next attempt is the last of a sibling that was running each time when something crashed.

        A prompt that brings its worker down takes innocent ones with it: on their last chance they take turns.
        """
        if sibling.sealed is not None:
            return False
        last_failure = sibling.infrastructure_failures >= self._limits.max_infrastructure_failures
        return (saw_worker_die and last_failure) or sibling.interruptions >= self._limits.max_interrupted_attempts

    def is_last_chance(self, sibling: Sibling) -> bool:
        """Whether an infrastructure failure now leaves it one attempt at most."""
        return sibling.infrastructure_failures + 1 >= self._limits.max_infrastructure_failures

    def explain_interruptions(self, sibling: Sibling) -> str:
        """Why a sibling is given up that never failed in this life of the run."""
        return (
            f"{sibling.interruptions} restarts interrupted generation {sibling.generation_index} while it ran, and "
            f"async_rl.max_interrupted_attempts is {self._limits.max_interrupted_attempts}"
        )

    def pause_s(self, sibling: Sibling) -> float:
        """Seconds to wait before the next attempt: doubles with each infrastructure failure, up to a cap."""
        first_s, most_s = self._limits.retry_backoff_s, self._limits.retry_backoff_max_s
        return backoff_s(sibling.infrastructure_failures, first_s=first_s, most_s=most_s)

    def require_skippable(
        self, group_id: str, *, already_skipped: int, in_a_row: int, infrastructure: bool, message: str
    ) -> None:
        """Raise the original failure when the run may not give up one more prompt."""
        failure: type[RolloutFailure] = InfrastructureFailure if infrastructure else DataFailure
        if already_skipped >= self._limits.max_skipped_prompts:
            raise failure(
                f"group {group_id} failed for good ({message}) and async_rl.max_skipped_prompts "
                f"{self._limits.max_skipped_prompts} prompts were given up already; mend the cause and resume the run"
            )
        if in_a_row >= self._limits.max_consecutive_dropped_prompts:
            raise failure(
                f"group {group_id} failed for good ({message}) and the {in_a_row} prompts next to it in the data were "
                f"given up too, async_rl.max_consecutive_dropped_prompts is "
                f"{self._limits.max_consecutive_dropped_prompts}; mend the cause and resume the run"
            )

    def require_step_size(self, target_step: int, *, shortfall: int) -> None:
        """Raise when a step would become smaller than it may."""
        floor = max(1, math.ceil(self._limits.min_step_batch_fraction * self._step_size))
        left = self._step_size - shortfall
        if left < floor:
            raise BatchIncomplete(
                f"train step {target_step + 1} would shrink to {left} of {self._step_size} groups; "
                f"async_rl.min_step_batch_fraction {self._limits.min_step_batch_fraction} demands {floor}. "
                "Mend the cause of the dropped prompts and resume the run"
            )


def backoff_s(failures: int, *, first_s: float, most_s: float) -> float:
    """The pause after so many failures: none after none, `first_s` after one, then doubling up to `most_s`."""
    return min(first_s * 2.0 ** min(failures - 1, 60), most_s) if failures else 0.0
