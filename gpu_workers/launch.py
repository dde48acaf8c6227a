"""Starts and finds the actors of a run: the only file that knows every worker class.

All actors are detached and named in the namespace of their run, so that they outlive the flow that launched them.
"""

import time
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from gpu_workers.controller.samplers.build import build_sampler
from gpu_workers.controller_actor import ControllerActor
from gpu_workers.preemption import preemption_env
from gpu_workers.ray_generators import RayGeneratorHost
from gpu_workers.ray_ports import translate
from gpu_workers.runtime_names import (
    CONTROLLER,
    actors_of,
    end_workers,
    named,
    remove_weights,
    weights_dir,
)
from gpu_workers.training.runtime_env import trainer_env
from gpu_workers.training.trainer_actor import TrainerActor
from storage.errors import InfrastructureFailure, MidflightError
from storage.run_config import RunConfig

_ANSWER_S = 60.0


def find_controller(run: str) -> Any | None:
    """The living controller of a run, if any; one that was killed but is still listed counts as none."""
    controller = actors_of(run).get(CONTROLLER)
    if controller is None:
        return None
    try:
        ray.get(controller.describe.remote(), timeout=_ANSWER_S)
    except RayActorError:
        return None
    return controller


def launch_runtime(config: RunConfig, *, incarnation: str, model_dir: Path) -> Any:
    """Start generators and trainer ranks, wait until they are ready, then start the controller, empty.

    What an earlier incarnation left behind is ended first. If any part fails to start, all of it is ended again.
    Raises `ConfigurationError`, before anything is touched, when the sampler can't be built.
    """
    build_sampler(config)
    end_runtime(config.name)
    folder = weights_dir(config.name, config.store.url)
    remove_weights(folder)
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
        ).remote(config, incarnation, engines, trainers, pids, str(folder), str(model_dir))
        ray.get(controller.describe.remote())
    except BaseException as error:
        end_runtime(config.name)
        if isinstance(error, RayError) and not isinstance(error, MidflightError):
            raise translate(error, f"launch of run '{config.name}'") from error
        raise
    return controller


def end_runtime(run: str) -> None:
    """End every actor of a run and wait until their names are free; nothing happens when there is none."""
    deadline = time.monotonic() + _ANSWER_S
    while actors_of(run):
        end_workers(run, controller_last=False)
        if time.monotonic() > deadline:
            raise InfrastructureFailure(
                f"actors {sorted(actors_of(run))} of run '{run}' did not end within {_ANSWER_S} s; end them by hand"
            )
        time.sleep(0.05)


def _trainers(config: RunConfig, model_dir: Path, folder: Path, incarnation: str) -> list[Any]:
    actor: Any = ray.remote(TrainerActor)
    folder.mkdir(parents=True, exist_ok=True)
    rendezvous = f"file://{folder}/rendezvous-{incarnation}"
    return [
        actor.options(
            **named(config.name, f"trainer-{rank}"),
            num_cpus=config.cluster.cpus_per_trainer,
            num_gpus=config.cluster.gpus_per_trainer,
            runtime_env={"env_vars": trainer_env(config)},
        ).remote(config, str(model_dir), rank, config.cluster.num_trainers, str(folder), incarnation, rendezvous)
        for rank in range(config.cluster.num_trainers)
    ]
