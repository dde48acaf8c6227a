"""What one scenario does to a run: a function of its kind and seed, and of nothing else."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from storage.fault_plan import Action, Fault
from storage.fault_points import POINTS


class Kind(StrEnum):
    """What is done to the run. docs/chaos.md says it in words."""

    KILL_FLOW = "kill-flow"
    KILL_CONTROLLER = "kill-controller"
    KILL_GENERATOR = "kill-generator"
    KILL_ENGINE = "kill-engine"
    KILL_TRAINER = "kill-trainer"
    KILL_ENVIRONMENT = "kill-environment"
    KILL_AT_POINT = "kill-at-point"
    SLOW_STORE = "slow-store"
    FAILING_STORE = "failing-store"
    FULL_STORE = "full-store"
    TORN_FILE = "torn-file"
    FLIPPED_BIT = "flipped-bit"
    DOUBLE_CRASH = "double-crash"
    CRASH_IN_RESTORE = "crash-in-restore"


# Twenty scenarios in a row meet every kind once, and seven points; two hundred meet every point.
_POINT_SHARE = 7
ROTA = tuple(kind for kind in Kind if kind is not Kind.KILL_AT_POINT) + (Kind.KILL_AT_POINT,) * _POINT_SHARE


class Role(StrEnum):
    """Whom a kill from outside meets. `everything`: flow, controller and workers, as when a machine is taken away."""

    FLOW = "flow"
    CONTROLLER = "controller"
    GENERATOR = "generator"
    ENGINE = "engine"
    TRAINER = "trainer"
    ENVIRONMENT = "environment"
    EVERYTHING = "everything"


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGKILL to `role` after the `count`-th event of a kind in the run's trace."""

    role: Role
    event: str
    count: int

    def __str__(self) -> str:
        return f"{self.role} after {self.event} {self.count}"


@dataclass(frozen=True, slots=True)
class Scenario:
    """`kill` comes first, if there is one; the `faults` are planned for what follows it. `settings` are those of the
    run beside `configs/tiny.yaml`; with `served` its episodes are held by an environment server.
    """

    kind: Kind
    seed: int
    settings: Mapping[str, Any]
    kill: Kill | None = None
    faults: tuple[Fault, ...] = ()
    served: bool = False

    @property
    def run(self) -> str:
        """Name of its run."""
        return f"{self.kind}-{self.seed}"

    @property
    def described(self) -> str:
        """What happens, in the order in which it does."""
        faults = [f"{f.action} at {f.point}, visit {f.visit}" + (f" x{f.times}" * (f.times > 1)) for f in self.faults]
        return "; then ".join([*([f"kill {self.kill}"] if self.kill else []), *faults])


def scenarios(first_seed: int, count: int, kinds: Sequence[Kind] = ()) -> list[Scenario]:
    """`count` scenarios of the seeds from `first_seed` on; of the given kinds in turn, or as in `ROTA`."""
    rota = tuple(kinds) or ROTA
    return [scenario(rota[seed % len(rota)], seed) for seed in range(first_seed, first_seed + count)]


# Moments at which a run of STEPS steps is hit, with the latest count that each run of it reaches for certain.
STEPS, PROMPTS, GENERATIONS = 10, 4, 4
_MOMENTS = {
    "attempt_dispatched": 60,
    "attempt_sealed": 48,
    "group_published": 14,
    "train_step": 5,
    "weight_sync": 5,
    "checkpoint_published": 2,
}
_SINGLE_TURN = {"data.task": "sort8", "generation.max_new_tokens": 12}
_MULTI_TURN = {
    "data.task": "guess15x4",
    "generation.max_new_tokens": 4,
}


def scenario(kind: Kind, seed: int) -> Scenario:
    """The scenario of a kind and a seed: always the same one."""
    chance = random.Random(f"{kind}/{seed}")
    settings = _settings(chance, multi_turn=kind is Kind.KILL_ENVIRONMENT or chance.random() < 0.5)
    roles = {f"kill-{role}": role for role in Role}
    if kind in roles:
        served = kind is Kind.KILL_ENVIRONMENT
        return Scenario(kind, seed, settings, kill=_kill(chance, roles[kind]), served=served)
    match kind:
        case Kind.KILL_AT_POINT:
            return _at_point(kind, seed, settings, chance)
        case Kind.DOUBLE_CRASH:
            first, second = (_kill_at(chance, chance.choice(_REPEATED)) for _ in range(2))
            return Scenario(kind, seed, settings, faults=(first, second))
        case Kind.CRASH_IN_RESTORE:
            faults = tuple(_kill_at(chance, point) for point in chance.choices(_OF_A_RESTORE, k=chance.randint(1, 2)))
            return _after_a_crash(kind, seed, settings, faults, chance)
        case Kind.TORN_FILE:
            return Scenario(kind, seed, settings, faults=(_torn(chance),))
        case Kind.FLIPPED_BIT:
            return Scenario(kind, seed, settings, faults=(_flipped(chance), Fault("*:after-write", Action.KILL, 12)))
    return Scenario(kind, seed, settings, faults=(_trouble(kind, chance),))


def _settings(chance: random.Random, *, multi_turn: bool) -> dict[str, Any]:
    return {
        "algorithm.max_steps": STEPS,
        "algorithm.num_prompts_per_step": PROMPTS,
        "algorithm.num_generations_per_prompt": GENERATIONS,
        "async_rl.max_lookahead_versions": chance.choice([0, 1, 1]),
        "async_rl.retry_backoff_s": 0.1,
        "checkpointing.save_period": chance.choice([1, 2, 3]),
        "checkpointing.async_save": chance.choice([False, True]),
        "generation.max_num_seqs": chance.choice([4, 8]),
        "rollout_checkpointing.interval_s": 0.2,
        "seed": chance.randrange(1000),
        **(_MULTI_TURN if multi_turn else _SINGLE_TURN),
        "rollout_recovery.target_level": chance.choice(["turn" if multi_turn else "sibling", "prefix"]),
    }


def _kill(chance: random.Random, role: Role) -> Kill:
    event = chance.choice(sorted(_MOMENTS))
    return Kill(role, event, chance.randint(1, _MOMENTS[event]))


def _kill_of_all(chance: random.Random) -> Kill:
    """Late enough that there is something to restore."""
    return Kill(chance.choice([Role.CONTROLLER, Role.EVERYTHING]), "train_step", chance.randint(3, 6))


# Points that are passed once in the life of a controller, or once a restore.
_ONCE = frozenset({"run-record", "claim", "sign-of-life"})
# Points that only a run passes that is restored, with something to read.
_AFTER_A_CRASH = frozenset({"part:read", "table:read", "model-file:read"})
_OF_A_RESTORE = (*sorted(_AFTER_A_CRASH), "manifest:read", *(p for p in POINTS if p.startswith("restore:")))
# How often a point is passed in STEPS steps, at least.
_LATEST_VISIT = {"table": 16, "model-file": 8, "part": 3, "checkpoint-manifest": 2, "snapshot-manifest": 2}
# Points that a run passes again after a crash at any of them.
_REPEATED = tuple(
    point
    for point in POINTS
    if point not in _AFTER_A_CRASH and "delete" not in point and not point.startswith(("retired", "snapshot:env"))
)


def _kill_at(chance: random.Random, point: str) -> Fault:
    kind, _, moment = point.partition(":")
    latest = _LATEST_VISIT.get(kind, 1) if "write" in moment else 2 if kind in ("step", "checkpoint", "weights") else 1
    return Fault(point, Action.KILL, visit=chance.randint(1, latest))


def _at_point(kind: Kind, seed: int, settings: Mapping[str, Any], chance: random.Random) -> Scenario:
    """Seeds in a row take the points in turn. The runs of the points that need it are crashed before."""
    turn = seed // len(ROTA) * _POINT_SHARE + max(seed % len(ROTA) - (len(ROTA) - _POINT_SHARE), 0)
    point = sorted(POINTS)[turn % len(POINTS)]
    if point == "snapshot:environment-closed":
        settings = {**settings, **_MULTI_TURN}
    if "delete" in point or point.startswith("retired"):
        settings = {**settings, "checkpointing.save_period": 1}  # more checkpoints than are kept
    fault = _kill_at(chance, point)
    if point in _AFTER_A_CRASH or point.startswith("restore:"):
        return _after_a_crash(kind, seed, settings, (fault,), chance)
    return Scenario(kind, seed, settings, faults=(fault,))


def _after_a_crash(
    kind: Kind, seed: int, settings: Mapping[str, Any], faults: tuple[Fault, ...], chance: random.Random
) -> Scenario:
    """Kills in the restore that follows a crash. Where they wait for something to be read, the crash comes when a
    bundle was published that is sure to have it: a part, tables, and a trainer checkpoint that it stands on.
    """
    if not _AFTER_A_CRASH & {fault.point for fault in faults}:
        return Scenario(kind, seed, settings, kill=_kill_of_all(chance), faults=faults)
    settings = {**settings, "async_rl.max_lookahead_versions": 1, "checkpointing.async_save": False}
    noticed = tuple(
        Fault(point, Action.SLOW, visit=chance.randint(1, 2))
        for point in ("checkpoint-manifest:after-write", "part:after-write")
    )
    crash = Fault("*-manifest:after-write", Action.KILL)
    return Scenario(kind, seed, settings, faults=(*noticed, crash, *faults))


def _torn(chance: random.Random) -> Fault:
    kind = chance.choice(sorted(_LATEST_VISIT))
    return Fault(f"{kind}:before-write", Action.TEAR, visit=chance.randint(1, _LATEST_VISIT[kind]))


def _flipped(chance: random.Random) -> Fault:
    """After the first bundles, so that there is something older to go back to."""
    kind = chance.choice(["table", "model-file", "part"])
    first = {"table": 17, "model-file": 8, "part": 3}[kind]
    return Fault(f"{kind}:after-write", Action.FLIP, visit=chance.randint(first, 2 * first))


def _trouble(kind: Kind, chance: random.Random) -> Fault:
    """A store that is in trouble for a number of calls, then well again."""
    point = chance.choice(["*:before-write", "*:after-write", "table:before-write", "*manifest:before-write"])
    visit, times = chance.randint(1, 12), chance.randint(1, 16)
    if kind is Kind.SLOW_STORE:
        return Fault(point, Action.SLOW, visit=visit, times=times, seconds=chance.choice([0.1, 0.3, 1.0]))
    if kind is Kind.FULL_STORE:
        return Fault(point.replace("after", "before"), Action.FULL, visit=visit, times=times)
    return Fault(point, Action.FAIL, visit=visit, times=times)
