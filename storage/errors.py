"""Every error of Midflight: what went wrong, whether trying again can help, and what to do next.

MidflightError
├── ConfigurationError        a key or value that can't work; nothing was started
├── StoreError
│   ├── StoreUnavailable      (retryable) I/O error or time-out; nothing is half-visible
│   ├── StoreOutcomeUnknown   (retryable) a write may or may not have happened
│   ├── AlreadyExists         an exclusive creation found the slot taken
│   ├── NotFound              the object isn't there
│   └── StoreUnsuitable       the store can't keep Midflight's promises (no exclusive creation)
├── SnapshotCorrupt           bytes, references or tables of a bundle are not what its manifest says
├── FormatUnsupported         a version or field this reader does not know
├── RestoreRefused            the bundle is whole, but does not fit this run
│   ├── DatasetChanged        a prompt's content is not what it was
│   └── NoRestorableState     candidates exist and all were refused
├── Fenced                    another controller took over this run
├── RunAlreadyLive            another driver drives this run now
├── StaleIncarnation          the runtime a task relied on is gone
├── StepOutOfOrder            a numbered step was asked for before its predecessor
├── RolloutFailure
│   ├── InfrastructureFailure (retryable) worker, connection or time-out
│   │   ├── WorkerDied        (retryable) the process that ran it is dead, whatever the prompt
│   │   └── ControllerSilent  (retryable) a controller that may live does not answer
│   ├── DataFailure           the prompt itself can't be rolled out
│   └── EnvironmentRefusal    an environment refused a call, by one of the codes of its control plane
├── FinalizationUnknown       a group's rows may or may not have been written; nothing is saved until a restart
├── GeneratorLost             a generator died again and again; restarting it does not help
├── TrainerLost               a trainer rank died, and with it the state that only it had
├── RunStalled                nothing got any further for too long
├── BatchIncomplete           a train step waits for groups that can never come
└── BrokenInvariant           a promise of the program itself does not hold: stop at once
"""


class MidflightError(Exception):
    """Base of all. The message names the thing, the value and the next step."""

    # Doing the same numbered thing again can help.
    retryable = False
    # The run is over, and starting it again (on a new runtime, or a while later) can go on from what was published.
    mended_by_resume = False


class ConfigurationError(MidflightError):
    """A configuration key or value that can't work."""


class StoreError(MidflightError):
    """Something about the store."""


class StoreUnavailable(StoreError):
    """The store failed or did not answer within its deadline."""

    retryable = True
    mended_by_resume = True


class StoreOutcomeUnknown(StoreError):
    """A write was sent and it is not known whether it happened; read it back before writing again."""

    retryable = True


class AlreadyExists(StoreError):
    """An exclusive creation found the object already there."""


class NotFound(StoreError):
    """The object is not in the store."""


class StoreUnsuitable(StoreError):
    """The store does not support exclusive creation or can't be written."""


class SnapshotCorrupt(MidflightError):
    """Bytes, references or tables differ from what the manifest promises."""


class FormatUnsupported(MidflightError):
    """A format version or a field that this reader does not know."""


class RestoreRefused(MidflightError):
    """A whole bundle that does not fit this run's configuration."""


class DatasetChanged(RestoreRefused):
    """A prompt's content hash is not the saved one."""


class NoRestorableState(RestoreRefused):
    """Snapshots or checkpoints exist, and every one of them was refused."""


class Fenced(MidflightError):
    """Another controller published to this run; this one may not publish any more."""


class RunAlreadyLive(MidflightError):
    """Another driver holds this run."""


class StaleIncarnation(MidflightError):
    """The task relied on a runtime that no longer exists."""

    mended_by_resume = True


class StepOutOfOrder(MidflightError):
    """A train step was asked for although its predecessor is not committed."""


class RolloutFailure(MidflightError):
    """One execution of a sibling failed."""


class InfrastructureFailure(RolloutFailure):
    """A worker, a connection or a deadline failed; the prompt is not to blame."""

    retryable = True
    mended_by_resume = True


class EnvironmentUnreachable(InfrastructureFailure):
    """Nobody listens where an environment should be: its process is gone, and with it what it held."""


class WorkerDied(InfrastructureFailure):
    """The worker that ran it died: its engine or its actor."""


class ControllerSilent(InfrastructureFailure):
    """The run's controller did not answer in time: it hangs, or its process is stopped."""


class DataFailure(RolloutFailure):
    """The prompt itself can't be rolled out."""


class EnvironmentRefusal(RolloutFailure):
    """An environment refused a call; `code` says why in one word, as its control plane does.

    `environment_closed`: it is closed for a checkpoint, the same call may be made again once it is open.
    """

    CODES = frozenset(
        {
            "environment_closed",
            "unknown_environment",
            "unknown_episode",
            "rollout_id_required",
            "stale_attempt",
            "stale_checkpoint",
            "checkpoint_conflict",
            "checkpoint_parked",
            "checkpoint_error",
            "invalid_phase",
            "deadline_exceeded",
            "invalid_checkpoint_state",
            "turn_conflict",
            "unauthorized",
        }
    )
    _TRANSIENT = frozenset({"deadline_exceeded", "checkpoint_parked", "checkpoint_error"})

    def __init__(self, code: str, message: str) -> None:
        super().__init__(code, message)
        self.code = code
        self.message = message
        self.retryable = code in self._TRANSIENT

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


class FinalizationUnknown(MidflightError):
    """A group's finalization failed after it had begun: whether its rows exist is unknown."""

    mended_by_resume = True


class GeneratorLost(MidflightError):
    """No generator is left: each died more often in a row than it may, or can't be started."""

    mended_by_resume = True


class TrainerLost(MidflightError):
    """A trainer rank died: model and optimizer are gone as far as no checkpoint holds them."""

    mended_by_resume = True


class RunStalled(MidflightError):
    """The run made no progress for `async_rl.stall_timeout_s`."""

    mended_by_resume = True


class BatchIncomplete(MidflightError):
    """Nothing is left that could complete the batch a train step waits for."""


class BrokenInvariant(MidflightError):
    """A promise of the program does not hold; continuing could lose or corrupt data."""
