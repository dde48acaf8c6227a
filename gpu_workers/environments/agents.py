"""Who plays a run's prompts, checked against its configuration before anything starts."""

import httpx

from gpu_workers.environments.gym_task import GymTask
from gpu_workers.environments.http_messages import CONTROL
from gpu_workers.environments.http_server import token_for
from gpu_workers.environments.tasks import Task, is_task_name
from storage.errors import ConfigurationError
from storage.run_config import RunConfig

_ANSWERS_S = 10.0


def require_agents(config: RunConfig, task: Task) -> None:
    """Raises ConfigurationError for recovery levels of agents or tasks that there are not, and for a Gym's agents
    without an address.
    """
    levels = config.rollout_recovery
    if unknown := sorted(levels.per_agent.keys() - task.agents):
        raise ConfigurationError(
            f"rollout_recovery.per_agent names {unknown}, but {config.data.task!r} is played by "
            f"{sorted(task.agents) or 'no agent'}; correct the name or leave it out"
        )
    if unknown := sorted(name for name in levels.per_task if not is_task_name(name)):
        raise ConfigurationError(
            f"rollout_recovery.per_task names {unknown}, which no task is called; correct the name"
        )
    if isinstance(task, GymTask):
        _require_gym(config, task)


def _require_gym(config: RunConfig, task: GymTask) -> None:
    known = config.environment.gym_agents
    if missing := sorted(task.agents - known.keys()):
        raise ConfigurationError(
            f"the rows of {config.data.task!r} are played by {missing}, which environment.gym_agents has no URL for; "
            f"it knows {sorted(known)}"
        )
    token_for(config.environment.gym_model_host, without_token=True)
    if config.generation.num_engines != 1:
        raise ConfigurationError(
            f"generation.num_engines is {config.generation.num_engines}, but a Gym's model calls go to one address; "
            "use one engine (generation.tensor_parallel_size spreads it over several GPUs)"
        )


def require_reachable(config: RunConfig, task: Task) -> None:
    """Blocking. Raises ConfigurationError for an agent of the run's Gym that nobody answers for."""
    for agent in sorted(task.agents) if isinstance(task, GymTask) else []:
        url = config.environment.gym_agents[agent]
        try:
            httpx.get(f"{url.rstrip('/')}{CONTROL}/status", timeout=_ANSWERS_S, trust_env=False)
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise ConfigurationError(
                f"environment.gym_agents gives '{agent}' the URL {url!r}, which can't be reached "
                f"({type(error).__name__}); start it, or correct the URL"
            ) from error
