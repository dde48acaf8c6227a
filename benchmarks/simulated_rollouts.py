"""Rollouts on a simulated engine that are interrupted again and again, at any recovery level.

The generation side is the real one: model calls, the look at running calls, their continuation. What a controller does
about an interruption is put in a few lines: what was saved last comes back, what runs and what was lost runs again.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from random import Random

import numpy as np
from numpy.typing import NDArray

from benchmarks.length_distribution import LengthDistribution
from benchmarks.simulated_engine import SimulatedEngine, simulated
from gpu_workers.controller.ports import GroupOrder, KnownCall, PartialCompletion, SiblingOrder
from gpu_workers.generation.call_book import CallBook
from gpu_workers.generation.capture import Completion
from gpu_workers.generation.engine_requests import EngineRequests
from gpu_workers.generation.model_calls import ModelCalls
from gpu_workers.models.tokenizer import END_TOKEN_ID
from storage.records import Prompt, PromptRef, RecoveryLevel, rollout_id
from storage.run_config import RunConfig

OBSERVATION = (4, 5, 6)


@dataclass(frozen=True, slots=True)
class Workload:
    """`groups` prompt groups in dispatch order, `in_flight` of them together; `turns` model calls for each sibling."""

    groups: int
    in_flight: int
    siblings: int = 1
    turns: int = 1


@dataclass(frozen=True, slots=True)
class Disturbances:
    """Means in ticks, one tick being a token of each running call: `kill_every` random moments (0: never), new weights
    each `refit_every`, a snapshot each `saved_every` (0: at the very moment of each kill). `ends_run`: a kill takes
    everything back to the snapshot; else it takes the generator only, with the tokens since the look at running calls
    that each snapshot stands for.
    """

    kill_every: float
    refit_every: int
    saved_every: int = 0
    ends_run: bool = True


@dataclass(frozen=True, slots=True)
class Progress:
    """What there is of a sibling: lengths of its finished calls and all tokens up to the last of them, and the tokens
    that its call under way was continued from. `continued` counts how often it was, `continuations` that of finished
    calls; `restarts` how often the sibling was started again.
    """

    lengths: tuple[int, ...] = ()
    history: tuple[int, ...] = ()
    partial: PartialCompletion | None = None
    continued: int = 0
    continuations: tuple[int, ...] = ()
    restarts: int = 0

    def after_kill(self, level: RecoveryLevel, turns: int) -> "Progress":
        """What is left of it, as it was saved, in a group of which something has to run again."""
        restarts = self.restarts + 1
        if level.keeps_siblings and len(self.lengths) == turns:
            return self
        if not level.keeps_turns:
            return Progress(restarts=restarts)
        if self.partial is None or not level.keeps_tokens:
            return replace(self, partial=None, continued=0, restarts=restarts)
        return replace(self, continued=self.continued + 1, restarts=restarts)

    def with_call(self, asked: tuple[int, ...], completion: Completion) -> "Progress":
        """The next turn is finished."""
        return replace(
            self,
            lengths=(*self.lengths, len(completion.token_ids)),
            history=(*asked, *completion.token_ids),
            partial=None,
            continued=0,
            continuations=(*self.continuations, self.continued),
        )


@dataclass(frozen=True, slots=True)
class Saved:
    """A snapshot: the next group, those in flight, and how many calls of finished ones there were."""

    next_group: int = 0
    groups: Mapping[int, tuple[Progress, ...]] = field(default_factory=dict)
    finished: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """Lengths of all responses in tokens, how often each was continued, kills, and tokens sampled in all."""

    lengths: NDArray[np.int64]
    continued: NDArray[np.int64]
    kills: int
    sampled: int

    @property
    def mean(self) -> float:
        """Mean length."""
        return float(self.lengths.mean())

    def longer(self, length: int) -> float:
        """Share of responses of more than `length` tokens."""
        return float((self.lengths > length).mean())

    @property
    def sampled_again(self) -> float:
        """Tokens that were sampled for nothing, as a share of those of all responses."""
        return self.sampled / float(self.lengths.sum()) - 1


class InterruptedRollouts:
    """One run of a workload at one level, from its first call to the end of its last."""

    def __init__(
        self,
        level: RecoveryLevel,
        workload: Workload,
        disturbances: Disturbances,
        lengths: LengthDistribution,
        *,
        seed: int,
        observe: Callable[[SiblingOrder, Completion], None] = lambda _sibling, _completion: None,
    ) -> None:
        """`observe` sees each completion, with the part that it was continued from in the sibling's order."""
        self._observe = observe
        self._level = level
        self._workload = workload
        self._disturbances = disturbances
        self._distribution = lengths
        self._random = Random(seed)
        self._config = RunConfig.model_validate(
            {
                "name": "simulated",
                "seed": seed,
                "generation": {"max_new_tokens": 2048, "max_model_len": 16384},
                "rollout_recovery": {"target_level": level.value},
            }
        )
        self._groups: dict[int, tuple[Progress, ...]] = {}
        self._next_group = 0
        self._finished: list[tuple[int, int]] = []  # length and continuations of each call
        self._saved = Saved()
        self._version = self._kills = self._sampled = 0
        self._start_generator()

    def _start_generator(self) -> None:
        workload = self._workload
        self._engine = SimulatedEngine(self._distribution, capacity=workload.in_flight * workload.siblings)
        self._engine.refit(self._version)
        engine = simulated(self._config, self._engine, (END_TOKEN_ID,))
        self._book = CallBook(EngineRequests(self._engine), keeps=self._level.keeps_tokens)
        self._calls = ModelCalls(self._config, engine, "generator 0", self._book)
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None

    async def run(self) -> Outcome:
        """Until every group is finished."""
        to_kill, to_refit, to_save = self._next_kill(), self._disturbances.refit_every, self._disturbances.saved_every
        self._dispatch()
        while self._groups:
            await self._settled()
            if to_kill == 0:
                await self._kill()
                to_kill, to_refit = self._next_kill(), self._random.randint(1, self._disturbances.refit_every)
                continue
            if to_save == 0 and self._disturbances.saved_every:
                self._save()
                to_save = self._disturbances.saved_every
            if to_refit == 0:
                self._version += 1
                self._engine.refit(self._version)
                to_refit = self._disturbances.refit_every
            self._sampled += self._engine.tick()
            to_kill, to_refit, to_save = to_kill - 1, to_refit - 1, to_save - 1
        lengths, continued = np.array(self._finished, np.int64).T
        return Outcome(lengths, continued, self._kills, self._sampled)

    def _next_kill(self) -> int:
        """Ticks to the next kill: exponential, so that kills know nothing of each other; -1 if there is none."""
        mean = self._disturbances.kill_every
        return 1 + int(self._random.expovariate(1 / mean)) if mean else -1

    def _dispatch(self) -> None:
        """Fill the places with new groups."""
        workload = self._workload
        while len(self._groups) < workload.in_flight and self._next_group < workload.groups:
            number, self._next_group = self._next_group, self._next_group + 1
            self._groups[number] = (Progress(),) * workload.siblings
            self._launch(number)

    def _launch(self, number: int) -> None:
        prompt = Prompt(PromptRef(number, 0, ""), (3, 3, 3), "{}")
        siblings = self._groups[number]
        orders = tuple(self._order(index, progress) for index, progress in enumerate(siblings))
        order = GroupOrder(prompt.ref.group_id, prompt, orders, keeps_running=self._level.keeps_tokens)
        for sibling, progress in zip(orders, siblings, strict=True):
            if len(progress.lengths) < self._workload.turns:
                task = asyncio.create_task(self._play(number, order, sibling, progress))
                self._tasks.add(task)
                task.add_done_callback(self._ended)

    def _order(self, index: int, progress: Progress) -> SiblingOrder:
        return SiblingOrder(
            index,
            attempt=0,
            environment_attempt=progress.restarts,
            turns=len(progress.lengths),
            history=progress.history,
            partial=progress.partial,
        )

    async def _play(self, number: int, order: GroupOrder, sibling: SiblingOrder, progress: Progress) -> None:
        for turn in range(len(progress.lengths), self._workload.turns):
            asked = (*progress.history, *(OBSERVATION if turn else order.prompt.token_ids))
            completion = await self._calls.complete(order, sibling, asked, turn=turn)
            progress = progress.with_call(asked, completion)
            self._replace(number, sibling.generation_index, progress)
            self._observe(sibling if turn == sibling.turns else replace(sibling, partial=None), completion)
        self._book.over(rollout_id(order.group_id, sibling.generation_index), sibling, forget=True)
        if all(len(one.lengths) == self._workload.turns for one in self._groups[number]):
            self._finish(number)

    def _replace(self, number: int, index: int, progress: Progress) -> None:
        siblings = self._groups[number]
        self._groups[number] = (*siblings[:index], progress, *siblings[index + 1 :])

    def _finish(self, number: int) -> None:
        for sibling in self._groups.pop(number):
            self._finished += zip(sibling.lengths, sibling.continuations, strict=True)
        self._dispatch()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._failure = task.exception()

    async def _settled(self) -> None:
        """Until every unfinished sibling waits for the engine."""
        while self._engine.num_requests < len(self._tasks):
            await asyncio.sleep(0)
            if self._failure is not None:
                raise self._failure

    def _save(self) -> None:
        """A snapshot of now; the tokens of running calls are in it at the level that keeps them."""
        groups = dict(self._groups)
        if self._level.keeps_tokens:
            partial = self._peek()
            for number, siblings in groups.items():
                name = PromptRef(number, 0, "").group_id
                groups[number] = tuple(
                    replace(one, partial=partial.get(rollout_id(name, index), one.partial))
                    for index, one in enumerate(siblings)
                )
        self._saved = Saved(self._next_group, groups, len(self._finished))

    def _peek(self) -> dict[str, PartialCompletion]:
        """By rollout, the tokens so far of its running call."""
        wanted = {
            rollout_id(PromptRef(number, 0, "").group_id, index): KnownCall(one.restarts, turn=len(one.lengths))
            for number, siblings in self._groups.items()
            for index, one in enumerate(siblings)
            if len(one.lengths) < self._workload.turns
        }
        return {
            call.rollout_id: PartialCompletion(call.turn, call.prompt_digest, call.sampling, call.sampled)
            for call in self._book.peek(wanted).calls
        }

    async def _kill(self) -> None:
        """The generator is gone; another one goes on with what was saved."""
        if not self._disturbances.saved_every:
            self._save()
        self._kills += 1
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._disturbances.ends_run:
            del self._finished[self._saved.finished :]
            self._next_group, left = self._saved.next_group, dict(self._saved.groups)
        else:
            left = {number: self._as_looked_at(number) for number in self._groups}
        self._start_generator()
        turns = self._workload.turns
        self._groups = {n: tuple(one.after_kill(self._level, turns) for one in group) for n, group in left.items()}
        for number in self._groups:
            self._launch(number)
        self._dispatch()

    def _as_looked_at(self, number: int) -> tuple[Progress, ...]:
        """A group as it is, apart from tokens of running calls that no look has seen."""
        siblings = self._groups[number]
        seen = self._saved.groups.get(number, siblings)
        return tuple(
            replace(now, partial=then.partial if len(then.lengths) == len(now.lengths) else None)
            for now, then in zip(siblings, seen, strict=True)
        )
