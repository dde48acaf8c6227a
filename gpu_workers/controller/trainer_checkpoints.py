"""Saves trainer checkpoints: model and optimizer by the trainer, rollout state beside them, the manifest last."""

from gpu_workers.controller.bundle_publisher import BundlePublisher, is_retryable
from gpu_workers.controller.parts import RolloutParts
from gpu_workers.controller.ports import Trainer
from storage.errors import BrokenInvariant
from storage.manifests import Anchor, FileEntry


class TrainerCheckpoints:
    """`save` holds the save lock for its whole length."""

    def __init__(self, parts: RolloutParts, trainer: Trainer, publisher: BundlePublisher) -> None:
        self._parts = parts
        self._trainer = trainer
        self._publisher = publisher

    async def save(self, step: int) -> Anchor:
        """Make the committed step `step` durable; one that is durable already is left as it is.

        A retryable failure may be tried again; any other one ends the run.
        """
        async with self._publisher.lock:
            try:
                return await self._save_locked(step)
            except Exception as error:
                if not is_retryable(error):
                    self._parts.state.fail(error)
                raise

    async def _save_locked(self, step: int) -> Anchor:
        publisher = self._publisher
        if publisher.durable.kind == "checkpoint" and publisher.durable.step == step:
            return publisher.durable
        if self._parts.buffer.claimed():
            raise BrokenInvariant(f"trainer checkpoint of step {step} while a train step holds claimed groups")
        captured = await publisher.capture(model_step=step)
        if (captured.trainer_step, captured.state.model_step) != (step, step):
            raise BrokenInvariant(
                f"trainer checkpoint of step {step} found the trainer at {captured.trainer_step} and rollout state on "
                f"{captured.state.model_step}"
            )
        entries = await self._trainer.save(publisher.checkpoint_prefix(step))
        await publisher.publish_checkpoint(captured, [FileEntry(**entry) for entry in entries])
        return publisher.durable
