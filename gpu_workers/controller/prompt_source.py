"""The dataset's prompts in a seeded order: which was taken last, and how to read one again by its id."""

import hashlib
from collections.abc import Iterator
from typing import Protocol

import numpy as np

from gpu_workers.controller.barrier import Mutation
from storage.errors import DatasetChanged
from storage.records import Prompt, PromptRef, SourcePosition


class Dataset(Protocol):
    """Prompts by ordinal; the same ordinal always gives the same content."""

    def __len__(self) -> int: ...

    def prompt(self, ordinal: int) -> tuple[tuple[int, ...], str]:
        """Token ids and the task's JSON of one prompt."""
        ...

    def agent(self, ordinal: int) -> str:
        """Who plays the prompt: an environment, or an agent of a Gym; "" where the model just answers."""
        ...

    def fingerprint(self) -> str:
        """A hash that changes when any prompt changes."""
        ...


def content_hash(token_ids: tuple[int, ...], task_json: str) -> str:
    """sha256 (hex) over a prompt's content."""
    digest = hashlib.sha256(np.asarray(token_ids, dtype="<i4").tobytes())
    digest.update(task_json.encode())
    return digest.hexdigest()


class PromptSource:
    """Hands out every prompt of every epoch once. The position is (epoch, how many taken), never a sample count."""

    def __init__(self, dataset: Dataset, *, num_epochs: int, seed: int, shuffle: bool) -> None:
        self.dataset = dataset
        self._num_epochs = num_epochs
        self._seed = seed
        self._shuffle = shuffle
        self._position = SourcePosition()
        self._order_epoch = -1
        self._order = np.empty(0, dtype=np.int64)

    @property
    def position(self) -> SourcePosition:
        """The next prompt to take."""
        return self._position

    @property
    def exhausted(self) -> bool:
        """Whether every prompt of the last epoch was taken."""
        return self._position.epoch >= self._num_epochs

    def take(self, mutation: Mutation, count: int) -> list[PromptRef]:
        """Take the next `count` prompts, fewer at the end of the last epoch; the caller owns them in this mutation."""
        mutation.require_live()
        taken: list[PromptRef] = []
        while len(taken) < count and not self.exhausted:
            epoch, offset = self._position.epoch, self._position.offset
            ordinal = int(self._epoch_order(epoch)[offset])
            taken.append(PromptRef(ordinal, epoch, content_hash(*self.dataset.prompt(ordinal))))
            last = offset + 1 == len(self.dataset)
            self._position = SourcePosition(epoch + 1, 0) if last else SourcePosition(epoch, offset + 1)
        return taken

    def ordinals(self, epoch: int) -> list[int]:
        """The prompt ids of one epoch in the order in which they are handed out."""
        return [int(ordinal) for ordinal in self._epoch_order(epoch)]

    def load(self, ref: PromptRef) -> Prompt:
        """Read a prompt again by id. Raises `DatasetChanged` naming the id and both hashes, or the missing ordinal."""
        if not 0 <= ref.prompt_id < len(self.dataset):
            raise DatasetChanged(
                f"prompt {ref.prompt_id} is not in the dataset, which has {len(self.dataset)} prompts; "
                "restore with the dataset the snapshot was made with"
            )
        token_ids, task_json = self.dataset.prompt(ref.prompt_id)
        found = content_hash(token_ids, task_json)
        if found != ref.content_hash:
            raise DatasetChanged(
                f"prompt {ref.prompt_id} has content hash {found[:12]}, the snapshot saved {ref.content_hash[:12]}; "
                "restore with the dataset the snapshot was made with"
            )
        return Prompt(ref, token_ids, task_json)

    def place_of(self, ref: PromptRef) -> int:
        """How many prompts are handed out before this one, over all epochs."""
        (places,) = np.nonzero(self._epoch_order(ref.epoch) == ref.prompt_id)
        return ref.epoch * len(self.dataset) + int(places[0])

    def group_ids_from(self, place: int, *, step: int) -> Iterator[str]:
        """Group ids of the prompts before (step -1) or after (step 1) a place, as far as they were handed out."""
        size = len(self.dataset)
        passed = self._position.epoch * size + self._position.offset
        place += step
        while 0 <= place < passed:
            epoch, offset = divmod(place, size)
            yield PromptRef(int(self._epoch_order(epoch)[offset]), epoch, "").group_id
            place += step

    def seek(self, position: SourcePosition) -> None:
        """Continue from a saved position. Raises `DatasetChanged` when it lies outside the dataset."""
        if position.epoch < self._num_epochs and position.offset >= max(len(self.dataset), 1):
            raise DatasetChanged(
                f"the saved position is prompt {position.offset} of epoch {position.epoch}, but the dataset has "
                f"{len(self.dataset)} prompts; restore with the dataset the snapshot was made with"
            )
        self._position = position

    def _epoch_order(self, epoch: int) -> np.ndarray:
        if epoch != self._order_epoch:
            size = len(self.dataset)
            rng = np.random.default_rng([self._seed, epoch])
            self._order = rng.permutation(size) if self._shuffle else np.arange(size)
            self._order_epoch = epoch
        return self._order
