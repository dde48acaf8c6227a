"""Groups whose budget is spent: the prompt is credited as dropped, and its place is filled or its step shrinks.

A place in step s is filled in one of three ways, all of them one mutation:

    a spare is in hand, a later group is ready    the ready group is promoted into step s, the spare repays its place
    a spare is in hand, no later group is ready   the spare takes the place and is generated for step s
    no spare in hand, or `shrink`                 step s has a shortfall of one more group

Only ready groups are promoted, only into steps that are not trained yet, and never without a spare to repay them.
"""

import itertools
from dataclasses import replace

from gpu_workers.controller.barrier import Mutation
from gpu_workers.controller.failures import FailurePolicy
from gpu_workers.controller.parts import RolloutParts
from gpu_workers.controller.stale_groups import count_skipped, has_failed
from storage.records import BufferedGroup, DroppedPrompt, LedgerGroup, PromptRef


class FailedGroups:
    """Gives groups up for good, within the budgets of the run."""

    def __init__(self, parts: RolloutParts) -> None:
        self._parts = parts
        self._policy = FailurePolicy(parts.config)

    async def give_up(self, group_id: str, message: str, *, infrastructure: bool) -> str | None:
        """Discard a group that failed with `message`; returns the id of the group to run instead, if any.

        Raises the original failure when the run may not give up one more prompt, `BatchIncomplete` when the step
        would become too small; nothing is changed then.
        """
        parts, state = self._parts, self._parts.state
        async with parts.barrier.mutation("give_up") as mutation:
            group = parts.ledger.group(group_id)
            self._policy.require_skippable(
                group_id,
                already_skipped=count_skipped(state.dropped),
                in_a_row=self._failed_in_a_row(group.prompt),
                infrastructure=infrastructure,
                message=message,
            )
            replaces, stamp = self._has_spare(group), group.target_step
            shortfall = 0 if replaces or stamp is None else state.shortfall.get(stamp, 0) + 1
            if stamp is not None and shortfall:
                self._policy.require_step_size(stamp, shortfall=shortfall)
            # First: a clean-up that fails keeps its owner.
            parts.rows.remove(mutation, parts.ledger.calls_of(group_id))
            parts.ledger.discard(mutation, group_id)
            if stamp is not None and shortfall:
                state.shortfall[stamp] = shortfall
            state.dropped.append(DroppedPrompt(group.prompt, message[:500], stamp))
            lender = self._lender(group) if replaces else None
            replacement = self._fill(mutation, group, lender) if replaces else None
        self._record(group, message, lender, replacement)
        state.changed.notify()
        return None if replacement is None else replacement.group_id

    def _failed_in_a_row(self, prompt: PromptRef) -> int:
        """Prompts that failed for good right before and after this one in the order of the data.

        It follows from what every bundle holds. In time, the failures of prompts that run together have no order.
        """
        source, dropped = self._parts.source, self._parts.state.dropped
        has_failed_by_id = {d.prompt.group_id: has_failed(d) for d in dropped}
        here = source.place_of(prompt)
        neighbours = (source.group_ids_from(here, step=step) for step in (-1, 1))
        run = (itertools.takewhile(has_failed_by_id.__contains__, ids) for ids in neighbours)
        # What a sampler gave up on the way says nothing: it is passed over.
        return sum(has_failed_by_id[group_id] for side in run for group_id in side)

    def _has_spare(self, group: LedgerGroup) -> bool:
        """Without stamps there is no pool, and no shortfall: a step takes whichever groups are finished."""
        if self._parts.config.async_rl.on_dropped_prompt != "replace":
            return False
        return not self._parts.source.exhausted if group.target_step is None else bool(self._parts.state.spares)

    def _lender(self, dropped: LedgerGroup) -> BufferedGroup | None:
        """The ready group furthest in the future of the dropped one's step; None for a step of the past."""
        step = dropped.target_step
        if step is None or step < self._parts.state.trainer_version:
            return None
        later = [g for g in self._parts.buffer.ready() if g.target_step is not None and g.target_step > step]
        return max(later, key=lambda group: (group.target_step or 0, group.order), default=None)

    def _fill(self, mutation: Mutation, dropped: LedgerGroup, lender: BufferedGroup | None) -> LedgerGroup:
        """Admit the next prompt: in the dropped group's place, or in that of the lender, which is promoted to it."""
        parts, state = self._parts, self._parts.state
        place = dropped
        if lender is not None:
            parts.buffer.promote(mutation, lender, target_step=dropped.target_step, order=dropped.order)
            # A batch of its own: no other unfinished group of the lender's batch need be left to share it.
            place = replace(dropped, batch=-1 - lender.order, order=lender.order, target_step=lender.target_step)
        prompt = parts.source.take(mutation, 1)[0] if place.target_step is None else state.spares.popleft()
        return parts.ledger.replace_dropped(
            mutation, place, prompt, level=parts.level_of(prompt), start_version=state.generator_version
        )

    def _record(
        self, dropped: LedgerGroup, message: str, lender: BufferedGroup | None, replacement: LedgerGroup | None
    ) -> None:
        """What became of the prompt and of its place; a replacement is reserved and admitted at once."""
        trace, place = self._parts.trace, "lost" if replacement is None else "replaced"
        trace.record(
            "prompt_dropped",
            group_id=dropped.group_id,
            reason=message[:500],
            target_step=dropped.target_step,
            place=place if lender is None else "promoted",
        )
        if replacement is None:
            return
        if lender is not None:
            trace.record(
                "group_promoted",
                group_id=lender.group_id,
                from_step=lender.target_step,
                to_step=dropped.target_step,
                instead_of=dropped.group_id,
                repaid_by=replacement.group_id,
            )
        trace.record(
            "group_reserved",
            group_id=replacement.group_id,
            prompt_id=replacement.prompt.prompt_id,
            epoch=replacement.prompt.epoch,
            batch=replacement.batch,
            level=replacement.level,
        )
        trace.record(
            "group_admitted",
            group_id=replacement.group_id,
            target_step=replacement.target_step,
            start_version=replacement.start_version,
        )
