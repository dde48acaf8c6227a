"""Errors of the command line and the flows, in the order in which they can happen. All are MidflightErrors."""

from storage.errors import MidflightError


class ServicesFailed(MidflightError):
    """A local service did not start or ended; the message names its log."""


class DeploymentFailed(MidflightError):
    """Prefect refused the deployments."""


class RestoreFailed(MidflightError):
    """The `restore` flow run of a training did not complete; the message names it and its reason."""


class TrainFailed(MidflightError):
    """A `train` flow run did not complete; the message is its reason."""


class DemoFailed(MidflightError):
    """The demo could not show what it is meant to show."""


class ChaosFailed(MidflightError):
    """A run under faults broke a promise; the message names the scenarios and how to repeat them."""
