"""One trainer rank: the methods of the `Trainer` port, blocking; an actor runs one of them at a time."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from gpu_workers.controller.ports import StepResult, WeightsRef
from gpu_workers.training.background_save import BackgroundSave
from gpu_workers.training.batches import pad_rows, read_rows
from gpu_workers.training.devices import prepare_device
from gpu_workers.training.epoch_updates import EpochUpdates
from gpu_workers.training.learner import build_learner
from gpu_workers.training.learner_state import capture, load_initial, load_state
from gpu_workers.training.random_state import RandomState
from gpu_workers.training.ranks import join_ranks
from gpu_workers.training.single_update import SingleUpdate
from gpu_workers.training.step_sequence import StepSequence
from gpu_workers.training.train_step import TrainStep
from gpu_workers.training.trainer_checkpoint import read_state, write_state
from gpu_workers.training.weights import WeightsFolder, weights_sha256
from gpu_workers.worker_logs import forward_logs
from storage.checkpoints import CheckpointFiles
from storage.filesystem import open_store
from storage.manifests import FileEntry
from storage.run_config import RunConfig


class TrainerActor:
    """Owns the networks, their optimizers and the step that is open. All ranks get the same calls in the same order.

    `rendezvous` is where several ranks meet (`file:///path` on one machine, `tcp://host:port`); one rank needs none.
    Published weights lie below `weights_dir/<incarnation>/`, so that a runtime that is still dying can't replace those
    of its successor.
    """

    def __init__(
        self,
        config: RunConfig,
        model_dir: Path,
        rank: int,
        world_size: int,
        weights_dir: Path,
        incarnation: str,
        rendezvous: str | None = None,
    ) -> None:
        forward_logs(config.name, f"trainer {rank}")
        self._incarnation = incarnation
        self._device = prepare_device(config)
        self._ranks = join_ranks(rank, world_size, rendezvous=rendezvous, device=self._device)
        self._random = RandomState(seed=config.seed, rank=rank, device=self._device)
        self._random.reset()
        self._learner = build_learner(config, Path(model_dir), self._ranks, device=self._device)
        self._policy = self._learner.policy
        self._weights = WeightsFolder(Path(weights_dir) / incarnation, dtype=self._policy.compute_type)
        self._store = open_store(config.store.url, deadline_s=config.store.deadline_s)
        self._sequence = StepSequence(StepResult(step=0))
        self._saves = BackgroundSave()
        self._version: int | None = None

    def ready(self) -> dict[str, Any]:
        """Who and where this rank is; answers once the model is loaded."""
        return {
            "pid": os.getpid(),
            "rank": self._ranks.rank,
            "world_size": self._ranks.size,
            "device": str(self._device),
            "incarnation": self._incarnation,
            "step": self._sequence.last.step,
            "num_parameters": sum(value.numel() for value in self._policy.parameters().values()),
        }

    def begin_step(self, step: int) -> None:
        """Start (or start again) the accumulation of gradients for `step`.

        Raises: StepOutOfOrder unless `step` follows the last finished one; BrokenInvariant after a step that ended
        between two of its updates.
        """
        self._sequence.begin(step, lambda: self._new_step(step))

    def train_microbatch(self, rows: Sequence[pa.RecordBatch]) -> dict[str, float]:
        """Take whole groups, in this order; see `TrainStep.add`."""
        return self._sequence.open_step().add(rows)

    def flush_microbatches(self) -> None:
        """Compute the rows that wait for a full forward pass, so that `finish_step` is short; see `TrainStep.flush`."""
        self._sequence.open_step().flush()

    def finish_step(self, step: int) -> StepResult:
        """Update policy and critic, all epochs; for the step finished last, its result again.

        Raises: StepOutOfOrder for any other step; BrokenInvariant, before the update, if loss or gradient norm isn't
        finite: the step then has to be begun again, or, if an earlier update was made, a checkpoint restored.
        """
        known = self._sequence.finished(step)
        if known is not None:
            return known
        metrics = self._sequence.open_step().apply()
        return self._sequence.commit(StepResult(step, metrics, weights_sha256(self._policy.tensors())))

    def publish_weights(self, version: int) -> WeightsRef:
        """Write the current weights as safetensors; `location` is the file, alone in its folder (rank 0 writes)."""
        self._sequence.refuse_torn()
        self._version = version
        path = self._weights.path(version)
        if self._ranks.rank == 0:
            self._weights.publish(version, self._policy.tensors())
        return WeightsRef(version, str(path))

    def begin_save(self, prefix: str) -> None:
        """Copy this rank's state and begin to write it below `prefix`, in a thread: the next step may begin at once.

        All ranks begin the same saves in the same order. Waits for an earlier one that is still being written.
        """
        self._sequence.refuse_torn()
        self._saves.wait()
        state = capture(self._learner, self._random, self._sequence.last)
        files = CheckpointFiles(self._store, prefix)
        self._saves.start(prefix, lambda: write_state(state, files, self._ranks))

    def saved_files(self, prefix: str) -> list[dict[str, Any]] | None:
        """Entries (`path`, `bytes`, `sha256`, `role`) of the files that `begin_save(prefix)` has written; None while it
        writes. Raises what it failed with.

        The checkpoint is the entries of all ranks together; whoever publishes them makes it exist.
        """
        entries = self._saves.written(prefix)
        if entries is None:
            return None
        return [entry.model_dump(include={"path", "bytes", "sha256", "role"}) for entry in entries]

    def save(self, prefix: str) -> list[dict[str, Any]]:
        """`begin_save`, and its files once they are written."""
        self.begin_save(prefix)
        self._saves.wait()
        return self.saved_files(prefix) or []

    def restore(self, files: Sequence[Mapping[str, Any]] | None) -> None:
        """Load a checkpoint's files, those of all ranks, or with None go back to the initial model.

        All or nothing on this rank. Raises: SnapshotCorrupt for files that are damaged, missing or do not belong
        together; RestoreRefused for another model's weights, another reference policy, a critic too many or missing.
        """
        if files is None:
            load_initial(self._learner, self._random)
            self._start_after(StepResult(step=0))
            return
        entries = [FileEntry.model_validate(dict(file)) for file in files]
        prefix = entries[0].path.rpartition("/")[0] if entries else ""
        state = read_state(entries, CheckpointFiles(self._store, prefix))
        load_state(state, self._learner, self._random)
        self._start_after(state.last)

    def log_probabilities(self, rows: Sequence[pa.RecordBatch]) -> list[list[float]]:
        """This policy's log-probabilities, in nats, of the sampled tokens of each row; nothing changes."""
        read = read_rows(rows, vocabulary_size=self._policy.vocabulary_size)
        found: list[list[float]] = []
        with torch.no_grad():
            for row in read:
                batch = pad_rows([row], device=self._device) if row.loss_mask.any() else None
                found.append([] if batch is None else self._policy.score(batch).logprobs.tolist())
        return found

    def _new_step(self, step: int) -> TrainStep:
        learner = self._learner
        if learner.critic is None and learner.config.updates_once:
            return TrainStep(SingleUpdate(learner, version=self._version), learner)
        return TrainStep(EpochUpdates(learner, step=step, version=self._version), learner)

    def _start_after(self, last: StepResult) -> None:
        self._sequence = StepSequence(last)
        self._version = None
