"""A learner's state for a checkpoint, and back: everything is checked before anything is changed."""

from gpu_workers.controller.ports import StepResult
from gpu_workers.training.critic_checkpoint import capture_critic
from gpu_workers.training.learner import Learner
from gpu_workers.training.random_state import RandomState
from gpu_workers.training.shards import copy_to_memory
from gpu_workers.training.trainer_checkpoint import TrainerState
from gpu_workers.training.weights import weights_sha256
from storage.errors import RestoreRefused


def capture(learner: Learner, random: RandomState, last: StepResult) -> TrainerState:
    """Copies, this rank's share; rank 0 alone holds weights."""
    critic, reference, rank = learner.critic, learner.reference, learner.ranks.rank
    return TrainerState(
        weights=copy_to_memory(learner.policy.tensors()) if rank == 0 else {},
        model_config=learner.policy.config_json,
        distributed=copy_to_memory({**learner.optimizer.tensors(), **random.tensors()}),
        updates=learner.optimizer.updates(),
        settings=learner.optimizer.settings(),
        last=last,
        critic=None if critic is None else capture_critic(critic, step=last.step, rank=rank),
        reference_sha256="" if reference is None else weights_sha256(reference.tensors()),
    )


def load_state(state: TrainerState, learner: Learner, random: RandomState) -> None:
    """Take over a checkpoint. Raises, before any change: SnapshotCorrupt, RestoreRefused."""
    learner.policy.check(state.weights)
    learner.optimizer.check(state.distributed, state.updates)
    _check_critic(state, learner)
    _check_reference(state, learner)
    learner.policy.load(state.weights)
    learner.optimizer.load(state.distributed, state.updates)
    if learner.critic is not None and state.critic is not None:
        learner.critic.load(state.critic.weights)
        learner.critic.optimizer.load(state.critic.moments, state.critic.updates)
    random.load(state.distributed)


def load_initial(learner: Learner, random: RandomState) -> None:
    """Go back to the state before the first step."""
    learner.policy.load_initial()
    learner.optimizer.reset()
    if learner.critic is not None:
        learner.critic.load_initial()
        learner.critic.optimizer.reset()
    random.reset()


def _check_critic(state: TrainerState, learner: Learner) -> None:
    if (state.critic is None) != (learner.critic is None):
        saved, now = ("no critic", "ppo") if state.critic is None else ("a critic", "grpo")
        raise RestoreRefused(
            f"the checkpoint of step {state.last.step} holds {saved}, but algorithm.kind is '{now}'; set "
            "algorithm.kind to what it was saved with, or start a run under another name"
        )
    if learner.critic is not None and state.critic is not None:
        learner.critic.check(state.critic.weights)
        learner.critic.optimizer.check(state.critic.moments, state.critic.updates)


def _check_reference(state: TrainerState, learner: Learner) -> None:
    """The KL penalty has to go on towards the same policy. Too large ones have no hash and aren't compared."""
    current = "" if learner.reference is None else weights_sha256(learner.reference.tensors())
    if current and state.reference_sha256 and current != state.reference_sha256:
        raise RestoreRefused(
            f"the checkpoint of step {state.last.step} was trained with a KL penalty towards weights "
            f"{state.reference_sha256}, the initial model now has {current}; put back the model that policy.model named"
        )
