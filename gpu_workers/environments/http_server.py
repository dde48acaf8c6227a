"""An environment as an HTTP server: `python -m gpu_workers.environments.http_server --port 8200`.

Each request carries the bearer token of MIDFLIGHT_ENVIRONMENT_TOKEN. Without one it serves the loopback only, and only
with `--without-token`.
"""

import argparse
import hmac
import ipaddress
import os
from collections.abc import Callable, Sequence
from typing import Annotated

import uvicorn
from fastapi import APIRouter, Depends, FastAPI, Header, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from gpu_workers.environments.control_plane import ControlPlane
from gpu_workers.environments.episode_table import EpisodeTable
from gpu_workers.environments.http_messages import (
    CONTROL,
    DATA_FAILURE,
    EPISODES,
    INFRASTRUCTURE_FAILURE,
    INVALID_REQUEST,
    TOKEN_VARIABLE,
    BoundaryReply,
    CheckpointBody,
    CloseBody,
    Done,
    ErrorBody,
    ErrorReply,
    ExportReply,
    ForgetBody,
    OpenBody,
    RestoreBody,
    RetireBody,
    StatusReply,
    StepBody,
    TimedBody,
)
from gpu_workers.environments.interface import Environment
from gpu_workers.environments.ports import EnvironmentControl, Episodes
from gpu_workers.environments.registry import find_environment, registered_environment
from storage.errors import ConfigurationError, DataFailure, EnvironmentRefusal, RolloutFailure

_STATUS = {
    "rollout_id_required": 400,
    "unknown_environment": 400,
    "unauthorized": 401,
    "unknown_episode": 409,
    "invalid_checkpoint_state": 422,
}


def build_app(control: EnvironmentControl, episodes: Episodes, token: str | None) -> FastAPI:
    """The app of one instance; every route asks for `token` unless it is None."""
    app = FastAPI(title="Midflight environment", openapi_url=None)
    app.add_exception_handler(RolloutFailure, _refused)
    app.add_exception_handler(RequestValidationError, _not_understood)

    async def authorized(authorization: Annotated[str, Header()] = "") -> None:
        if token is not None and not hmac.compare_digest(authorization.encode(), f"Bearer {token}".encode()):
            raise EnvironmentRefusal("unauthorized", f"send the bearer token of {TOKEN_VARIABLE}")

    guarded = [Depends(authorized)]
    app.include_router(_control_routes(control), prefix=CONTROL, dependencies=guarded)
    app.include_router(_episode_routes(episodes), prefix=EPISODES, dependencies=guarded)
    return app


def _control_routes(control: EnvironmentControl) -> APIRouter:
    router = APIRouter()

    @router.get("/status")
    async def status() -> StatusReply:
        return StatusReply(status=await control.status())

    @router.post("/prepare")
    async def prepare(body: TimedBody) -> StatusReply:
        return StatusReply(status=await control.prepare(body.checkpoint_id, body.deadline_ts))

    @router.post("/renew")
    async def renew(body: TimedBody) -> StatusReply:
        return StatusReply(status=await control.renew(body.checkpoint_id, body.deadline_ts))

    @router.post("/commit")
    async def commit(body: TimedBody) -> ExportReply:
        return ExportReply(exported=await control.commit(body.checkpoint_id, body.deadline_ts))

    @router.post("/restore")
    async def restore(body: RestoreBody) -> StatusReply:
        return StatusReply(status=await control.restore(body.checkpoint_id, body.deadline_ts, body.episodes))

    @router.post("/discard_restored")
    async def discard_restored(body: CheckpointBody) -> StatusReply:
        return StatusReply(status=await control.discard_restored(body.checkpoint_id))

    @router.post("/resume")
    async def resume(body: CheckpointBody) -> StatusReply:
        return StatusReply(status=await control.resume(body.checkpoint_id))

    @router.post("/retire")
    async def retire(body: RetireBody) -> Done:
        await control.retire(body.episodes)
        return Done()

    @router.post("/forget")
    async def forget(body: ForgetBody) -> Done:
        await control.forget(body.rollout_ids)
        return Done()

    return router


def _episode_routes(episodes: Episodes) -> APIRouter:
    router = APIRouter()

    @router.post("/open")
    async def open_(body: OpenBody) -> BoundaryReply:
        return BoundaryReply(boundary=await episodes.open(body.episode, body.task))

    @router.post("/step")
    async def step(body: StepBody) -> BoundaryReply:
        return BoundaryReply(boundary=await episodes.step(body.episode, body.turn, body.action, body.call))

    @router.post("/close")
    async def close(body: CloseBody) -> Done:
        await episodes.close(body.episode)
        return Done()

    return router


async def _refused(request: Request, error: Exception) -> JSONResponse:
    if isinstance(error, EnvironmentRefusal):
        return _reply(_STATUS.get(error.code, 409), error.code, error.message)
    if isinstance(error, DataFailure):
        return _reply(422, DATA_FAILURE, str(error))
    return _reply(503, INFRASTRUCTURE_FAILURE, str(error))


async def _not_understood(request: Request, error: Exception) -> JSONResponse:
    problems = error.errors() if isinstance(error, RequestValidationError) else []
    told = "; ".join(f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in problems[:3])
    return _reply(422, INVALID_REQUEST, f"{request.url.path} does not understand the body: {told}")


def _reply(status: int, code: str, message: str) -> JSONResponse:
    return JSONResponse(ErrorReply(error=ErrorBody(code=code, message=message)).model_dump(), status)


def served_environments(paths: Sequence[str]) -> Callable[[str], Environment]:
    """The lookup of a server: registered names, and the environments at these import paths by their own names.

    Raises ConfigurationError for a path that can't be imported.
    """
    own = {environment.name: environment for environment in map(find_environment, paths)}
    return lambda name: own[name] if name in own else registered_environment(name)


def token_for(host: str, *, without_token: bool) -> str | None:
    """The token to ask for. ConfigurationError: none is set, and this isn't a loopback that may go without."""
    token = os.environ.get(TOKEN_VARIABLE, "")
    if token:
        return token
    if without_token and _is_loopback(host):
        return None
    raise ConfigurationError(
        f"{TOKEN_VARIABLE} is not set for an environment at {host}; set it, or serve 127.0.0.1 with --without-token"
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def main() -> None:
    """Serve the registered environments until it is stopped."""
    parser = argparse.ArgumentParser(description="Serve environments over HTTP.")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--instance", default="environment-0")
    parser.add_argument("--grace-s", type=float, default=10.0)
    parser.add_argument("--without-token", action="store_true")
    parser.add_argument("--environment", action="append", default=[], help="also serve this package.module:Class")
    options = parser.parse_args()
    token = token_for(options.host, without_token=options.without_token)
    table = EpisodeTable(options.instance, served_environments(options.environment))
    app = build_app(ControlPlane(table, grace_s=options.grace_s), table, token)
    uvicorn.run(app, host=options.host, port=options.port, log_level="warning")


if __name__ == "__main__":
    main()
