"""Samplers of somebody else's package: some obey the contract, each of the others breaks it in one way."""

from gpu_workers.controller.samplers.selection import bounded


class ShortestFirst:
    """Trains the groups with the fewest tokens first; one batch for each version, no stamps."""

    restores_buffers = True
    claims = True

    def __init__(self, config):
        self._lookahead = config.async_rl.max_staleness_versions
        self.cursor = -1

    def may_admit(self, version):
        return self.cursor < version + self._lookahead

    def admit(self, mutation):
        self.cursor += 1

    def select(self, ready, unfinished, *, version, least, most):
        return bounded(sorted(ready, key=lambda group: (group.num_tokens, group.order)), least=least, most=most)

    def evict(self, ready, *, version):
        return []

    def should_abort_inflight(self, group, *, version):
        return False

    def required_capacity(self, num_prompts_per_step):
        return num_prompts_per_step * (self._lookahead + 1)

    def restore(self, saved):
        self.cursor = saved.cursor


class ReversedSteps(ShortestFirst):
    """Stamps its batches and trains each from its last group to its first."""

    def __init__(self, config):
        super().__init__(config)
        self._lookahead = config.async_rl.max_lookahead_versions

    def admit(self, mutation):
        self.cursor += 1
        return self.cursor

    def select(self, ready, unfinished, *, version, least, most):
        return bounded([group for group in reversed(ready) if group.target_step == version], least=least, most=most)

    def evict(self, ready, *, version):
        return [group for group in ready if group.target_step < version]


class Forgetful(ShortestFirst):
    """Can't select what it did not dispatch itself."""

    restores_buffers = False


class Unclaiming(ShortestFirst):
    claims = False


class Vague(ShortestFirst):
    claims = "sometimes"


class Silent:
    restores_buffers = True

    def __init__(self, config):
        self.cursor = -1


class NeedsMore(ShortestFirst):
    def __init__(self, config, temperature):
        super().__init__(config)


class Closed(ShortestFirst):
    def may_admit(self, version):
        return version > 0


class OldFashioned(ShortestFirst):
    def select(self, ready, *, version, most):
        return []


class Roomless(ShortestFirst):
    def required_capacity(self, num_prompts_per_step):
        return 0


class Spacious(ShortestFirst):
    def required_capacity(self, num_prompts_per_step):
        return 100


class Impatient(ShortestFirst):
    """Takes fewer groups than a step needs."""

    def select(self, ready, unfinished, *, version, least, most):
        return list(ready[:1])


class Greedy(ShortestFirst):
    """Selects what is not finished, evicts what it was not offered."""

    def select(self, ready, unfinished, *, version, least, most):
        return list(unfinished[:most])

    def evict(self, ready, *, version):
        return [ready[0], ready[0]] if ready else []


class Repetitive(ShortestFirst):
    """Gives one stamp to every batch."""

    def admit(self, mutation):
        self.cursor += 1
        return 0


class Moody(ShortestFirst):
    """Stamps every other batch."""

    def admit(self, mutation):
        self.cursor += 1
        return self.cursor if self.cursor % 2 else None


class Elsewhere(ShortestFirst):
    """Continues from another place than it was saved at."""

    def restore(self, saved):
        self.cursor = saved.cursor + 1
