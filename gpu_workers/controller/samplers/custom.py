"""`custom`: a policy from the user's own package, loaded once, at set-up, and held to the contract ever after."""

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from gpu_workers.controller.barrier import Mutation
from gpu_workers.controller.samplers.protocol import SamplingPolicy
from gpu_workers.controller.samplers.saved_dispatch import SavedDispatch
from storage.errors import BrokenInvariant, ConfigurationError
from storage.records import BufferedGroup, LedgerGroup
from storage.run_config import RunConfig

_VALUES = ("restores_buffers", "claims", "cursor")
_METHODS = ("may_admit", "admit", "select", "evict", "should_abort_inflight", "required_capacity", "restore")


class CustomSampler:
    """Passes every question on and checks the answers. Saved under the policy's import path."""

    def __init__(self, path: str, policy: SamplingPolicy) -> None:
        self.name = path
        self.claims = policy.claims
        self.restores_buffers = policy.restores_buffers
        self._policy = policy
        self._highest_stamp = -1

    @property
    def cursor(self) -> int:
        """The policy's dispatch cursor."""
        return self._policy.cursor

    def may_admit(self, version: int) -> bool:
        """Whether the policy lets the next batch go."""
        return self._policy.may_admit(version)

    def admit(self, mutation: Mutation) -> int | None:
        """Admit the next batch. Raises `BrokenInvariant` for a stamp given twice or beyond the cursor."""
        mutation.require_live()
        stamp = self._policy.admit(mutation)
        if stamp is not None:
            if not self._highest_stamp < stamp <= self.cursor:
                last, cursor = self._highest_stamp, self.cursor
                raise self._broken(f"admitted target step {stamp} after {last} with its cursor at {cursor}")
            self._highest_stamp = stamp
        return stamp

    def select(
        self,
        ready: Sequence[BufferedGroup],
        unfinished: Sequence[LedgerGroup],
        *,
        version: int,
        least: int,
        most: int,
    ) -> list[BufferedGroup]:
        """The policy's choice. Raises `BrokenInvariant` when it is not `least` to `most` ready groups, or none."""
        chosen = self._policy.select(ready, unfinished, version=version, least=least, most=most)
        self._require_ready("selected", chosen, ready)
        if chosen and not least <= len(chosen) <= most:
            raise self._broken(f"selected {len(chosen)} groups, asked for {least} to {most} or none")
        return list(chosen)

    def evict(self, ready: Sequence[BufferedGroup], *, version: int) -> list[BufferedGroup]:
        """What the policy gives up. Raises `BrokenInvariant` when it names a group that is not ready."""
        evicted = self._policy.evict(ready, version=version)
        self._require_ready("evicted", evicted, ready)
        return list(evicted)

    def should_abort_inflight(self, group: LedgerGroup, *, version: int) -> bool:
        """Whether the policy gives up an unfinished group."""
        return self._policy.should_abort_inflight(group, version=version)

    def required_capacity(self, num_prompts_per_step: int) -> int | None:
        """Groups the policy needs room for."""
        return self._policy.required_capacity(num_prompts_per_step)

    def require_restorable(self, saved: SavedDispatch) -> None:
        """Only what the same policy dispatched, under a cursor that covers every stamp."""
        saved.require_sampler(self.name)
        saved.require_covered()

    def restore(self, saved: SavedDispatch) -> None:
        """Continue from a saved cursor. Raises `BrokenInvariant` when the policy does not take it over exactly."""
        self.require_restorable(saved)
        self._policy.restore(saved)
        if self.cursor != saved.cursor:
            raise self._broken(f"stands at cursor {self.cursor} after it restored cursor {saved.cursor}")
        self._highest_stamp = max((step for step in saved.target_steps if step is not None), default=-1)

    def _require_ready(self, verb: str, named: Sequence[BufferedGroup], ready: Sequence[BufferedGroup]) -> None:
        ids = [group.group_id for group in named]
        strange = sorted(set(ids) - {group.group_id for group in ready})
        if strange or len(set(ids)) < len(ids):
            raise self._broken(f"{verb} {', '.join(strange) or 'a group twice'}, which it was not offered")

    def _broken(self, what: str) -> BrokenInvariant:
        return BrokenInvariant(f"async_rl.custom_sampler '{self.name}' {what}; mend the class and resume the run")


def load_custom_sampler(config: RunConfig) -> CustomSampler:
    """The policy at `async_rl.custom_sampler`, built with the run's configuration.

    Raises `ConfigurationError` when it can't be imported or built, or visibly does not obey the contract.
    """
    path = config.async_rl.custom_sampler or ""
    policy = _built(path, config)
    _require_members(path, policy)
    _try_out(path, policy, config.algorithm.num_prompts_per_step)
    return CustomSampler(path, policy)


def _built(path: str, config: RunConfig) -> Any:
    module_name, _, class_name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise _refused(
            path, f"module '{module_name}' can't be imported ({error!r}); install it beside Midflight"
        ) from error
    found = getattr(module, class_name, None)
    if not isinstance(found, type):
        classes = sorted(name for name, value in vars(module).items() if isinstance(value, type))
        raise _refused(
            path, f"module '{module_name}' has no class '{class_name}'; it has {', '.join(classes) or 'none'}"
        )
    try:
        return found(config)
    except Exception as error:
        raise _refused(path, f"can't be built as {class_name}(config): {error!r}") from error


def _require_members(path: str, policy: Any) -> None:
    missing = [name for name in _VALUES if not hasattr(policy, name)]
    missing += [f"{name}()" for name in _METHODS if not callable(getattr(policy, name, None))]
    if missing:
        raise _refused(path, f"lacks {', '.join(missing)}; see docs/samplers.md")
    for name in ("restores_buffers", "claims"):
        if not isinstance(value := getattr(policy, name), bool):
            raise _refused(path, f"declares {name} {value!r}; expected True or False")
    if not policy.claims:
        raise _refused(
            path,
            "declares claims False: groups taken out before their step has committed would be lost to a snapshot "
            "in between; let select() only name them and declare True",
        )


def _try_out(path: str, policy: Any, num_prompts_per_step: int) -> None:
    """Ask what may be asked at any time, of a run that has dispatched nothing; then continue another and come back."""

    def cursor_after(saved: SavedDispatch) -> int:
        policy.restore(saved)
        return int(policy.cursor)

    far, fresh = SavedDispatch(sampler=path, cursor=5, trainer_version=5), SavedDispatch(sampler=path)
    questions: list[tuple[str, Callable[[], Any], Callable[[Any], bool], str]] = [
        ("cursor", lambda: policy.cursor, lambda answer: answer == -1, "-1 before the first admission"),
        ("may_admit(0)", lambda: policy.may_admit(0), lambda answer: answer is True, "True for the first batch"),
        ("select() of nothing", lambda: policy.select((), (), version=0, least=1, most=1), lambda a: a == [], "[]"),
        ("evict() of nothing", lambda: policy.evict((), version=0), lambda answer: answer == [], "[]"),
        (
            "required_capacity()",
            lambda: policy.required_capacity(num_prompts_per_step),
            lambda answer: answer is None or (type(answer) is int and answer >= 1),
            "a positive number or None",
        ),
        ("cursor after restore() of 5", lambda: cursor_after(far), lambda answer: answer == 5, "5"),
        ("cursor after restore() of -1", lambda: cursor_after(fresh), lambda answer: answer == -1, "-1"),
    ]
    for question, ask, is_right, expected in questions:
        try:
            answer = ask()
        except Exception as error:
            raise _refused(path, f"{question} failed: {error!r}; see docs/samplers.md") from error
        if not is_right(answer):
            raise _refused(path, f"{question} is {answer!r}; expected {expected}")


def _refused(path: str, why: str) -> ConfigurationError:
    return ConfigurationError(f"async_rl.custom_sampler '{path}': {why}")
