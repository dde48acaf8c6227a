"""The tokens of one model call as they arrive: a look adds a part behind the others, which are not copied for it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gpu_workers.controller.ports import SampledTokens
from gpu_workers.controller.sampled_tokens import joined, part_of


@dataclass(frozen=True, slots=True)
class CallTokens:
    """`parts` lie one behind the other, none of them empty; `length` is that of all of them."""

    parts: tuple[SampledTokens, ...] = ()
    length: int = 0

    @classmethod
    def of(cls, parts: Sequence[SampledTokens]) -> "CallTokens":
        """Those of parts, of which some may be empty."""
        kept = tuple(part for part in parts if len(part))
        return cls(kept, sum(map(len, kept)))

    def __len__(self) -> int:
        return self.length

    def grown(self, start: int, found: SampledTokens) -> "CallTokens | None":
        """With the tokens that were found from index `start` on; None when these are not its first ones."""
        end = start + len(found)
        if start > self.length or end < self.length:
            return None
        overlap = self.length - start
        if overlap:
            known = self.since(start)
            same = np.array_equal(known.token_ids, found.token_ids[:overlap])
            if not (same and np.array_equal(known.logprobs, found.logprobs[:overlap])):
                return None
        return self if end == self.length else CallTokens((*self.parts, part_of(found, overlap, len(found))), end)

    def since(self, start: int) -> SampledTokens:
        """All from index `start` on, as one."""
        chosen, first = [], 0
        for part in self.parts:
            if first + len(part) > start:
                chosen.append(part_of(part, max(start - first, 0), len(part)))
            first += len(part)
        return joined(chosen)

    def begins_with(self, other: "CallTokens") -> bool:
        """Whether these are the other ones grown, and no others that look like them."""
        own = self.parts[: len(other.parts)]
        return len(own) == len(other.parts) and all(a is b for a, b in zip(own, other.parts, strict=True))
