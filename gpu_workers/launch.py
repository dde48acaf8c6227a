"""Starts and finds the actors of a run: the only file that knows every worker class.

All actors are detached and named in the namespace of their run, so that they outlive the flow that launched them.
"""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from gpu_workers.controller.samplers.build import build_sampler
from gpu_workers.controller_actor import ControllerActor
from gpu_workers.environments.agents import require_agents, require_reachable
from gpu_workers.environments.served import served_instances
from gpu_workers.environments.tasks import build_task
from gpu_workers.launch_lock import launch_lock
from gpu_workers.preemption import preemption_env
from gpu_workers.ray_generators import RayGeneratorHost
from gpu_workers.ray_ports import translate
from gpu_workers.runtime_names import (
    CONTROLLER,
    CONTROLLER_ANSWERS_S,
    actors_of,
    end_workers,
    hold_weights,
    named,
    remove_dead_weights,
    remove_weights,
    weights_dir,
)
from gpu_workers.training.runtime_env import trainer_env
from gpu_workers.training.trainer_actor import TrainerActor
from storage.errors import ControllerSilent, InfrastructureFailure, MidflightError, RunAlreadyLive
from storage.filesystem import open_store
from storage.layout import RunLayout
from storage.ownership import await_claimable
from storage.run_config import RunConfig

_END_S = 60.0


def launch_runtime(
    config: RunConfig, *, incarnation: str, model_dir: Path, launcher: str, take_over: bool = False
) -> Any:
    """Start generators and trainer ranks, wait until they are ready, then start the controller, empty.

    What an earlier incarnation left behind is ended first. If any part fails to start, all of it is ended again.
    Raises, before anything is started: `ConfigurationError` when the sampler can't be built or an environment server or
    a Gym's agent can't be reached; `RunAlreadyLive` when the run has a living controller here, or somebody else is
    starting one; unless `take_over`, also when one elsewhere holds the run in the store (see `storage.ownership`) or
    one here does not answer.
    """
    build_sampler(config)
    task = build_task(config.data)
    require_agents(config, task)
    require_reachable(config, task)
    served_instances(config.environment.servers)
    with launch_lock(config.name, launcher):
        _refuse_living(config.name, spare_silent=not take_over)
        _end_actors(config.name)
        store = open_store(config.store.url, deadline_s=config.store.deadline_s)
        claimable_after = None if take_over else await_claimable(store, RunLayout(config.name))
        return _launch(config, incarnation, model_dir, claimable_after)


def _refuse_living(run: str, *, spare_silent: bool) -> None:
    controller = actors_of(run).get(CONTROLLER)
    try:
        living = None if controller is None else _described(run, controller)
    except ControllerSilent:
        if spare_silent:
            raise
        return
    if living is not None:
        raise RunAlreadyLive(
            f"run '{run}' was started meanwhile, driven by {living['driver']} (incarnation {living['incarnation']}): "
            "wait for it, or cancel its flow run"
        )


def _launch(config: RunConfig, incarnation: str, model_dir: Path, claimable_after: int | None) -> Any:
    folder = weights_dir(config.name, config.store.url)
    remove_dead_weights(folder)
    weights = hold_weights(folder / incarnation)
    try:
        host = RayGeneratorHost(config, model_dir)
        engines = [host.create(index) for index in range(config.generation.num_engines)]
        trainers = _trainers(config, model_dir, folder, incarnation)
        ready = ray.get([worker.ready.remote() for worker in (*engines, *trainers)])
        pids = {"generators": ready[: len(engines)], "trainers": ready[len(engines) :]}
        actor: Any = ray.remote(ControllerActor)
        controller = actor.options(
            **named(config.name, CONTROLLER),
            num_cpus=0,
            max_concurrency=256,
            runtime_env={"env_vars": preemption_env()},
        ).remote(config, incarnation, engines, trainers, pids, str(folder), str(model_dir), claimable_after)
        ray.get(controller.describe.remote())
    except BaseException as error:
        _end_actors(config.name)
        remove_weights(weights)
        if isinstance(error, RayError) and not isinstance(error, MidflightError):
            raise translate(error, f"launch of run '{config.name}'") from error
        raise
    weights.release()
    return controller


def end_runtime(run: str, *, incarnation: str, caller: str) -> None:
    """End the actors of one incarnation of a run and wait until their names are free.

    Nothing happens when another incarnation has followed it, or is being started: that one clears up by itself.
    """
    try:
        with launch_lock(run, caller):
            controller = actors_of(run).get(CONTROLLER)
            described = None if controller is None else _described(run, controller)
            if described is None or described["incarnation"] == incarnation:
                _end_actors(run)
    except RunAlreadyLive:
        return


def _end_actors(run: str) -> None:
    """For the holder of the launch lock: end every actor of a run, and wait until their names are free."""
    deadline = time.monotonic() + _END_S
    while actors_of(run):
        end_workers(run, controller_last=False)
        if time.monotonic() > deadline:
            raise InfrastructureFailure(
                f"actors {sorted(actors_of(run))} of run '{run}' did not end within {_END_S:.0f} s; end them by hand"
            )
        time.sleep(0.05)


def _described(run: str, controller: Any) -> Mapping[str, Any] | None:
    """What a controller says about itself; None when it is dead."""
    try:
        described: Mapping[str, Any] = ray.get(controller.describe.remote(), timeout=CONTROLLER_ANSWERS_S)
    except RayActorError:
        return None
    except GetTimeoutError as error:
        raise ControllerSilent(
            f"the controller of run '{run}' does not answer within {CONTROLLER_ANSWERS_S:.0f} s: wait, or replace it "
            "with `midflight train --take-over`, which restores what it published"
        ) from error
    return described


def _trainers(config: RunConfig, model_dir: Path, folder: Path, incarnation: str) -> list[Any]:
    actor: Any = ray.remote(TrainerActor)
    rendezvous = f"file://{folder}/{incarnation}/rendezvous"
    return [
        actor.options(
            **named(config.name, f"trainer-{rank}"),
            num_cpus=config.cluster.cpus_per_trainer,
            num_gpus=config.cluster.gpus_per_trainer,
            runtime_env={"env_vars": trainer_env(config)},
        ).remote(config, str(model_dir), rank, config.cluster.num_trainers, str(folder), incarnation, rendezvous)
        for rank in range(config.cluster.num_trainers)
    ]
