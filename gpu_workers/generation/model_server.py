"""The chat completions route that a Gym's model server calls: each call is one of a running rollout, and is captured.

Sampling is the run's own: parameters of a request are not obeyed, since rollouts are trained on-policy.
"""

import asyncio
import hmac
import socket
import time
from contextlib import suppress
from typing import Annotated, Any

import uvicorn
from fastapi import Body, FastAPI, Header
from fastapi.responses import JSONResponse

from gpu_workers.environments.gym_run import ROLLOUT_FIELD
from gpu_workers.environments.gym_task import ChatMessage, messages_of
from gpu_workers.generation.capture import Completion
from gpu_workers.generation.gym_rollouts import GymRollouts
from storage.errors import ConfigurationError, InfrastructureFailure, RolloutFailure

_STARTS_S = 30.0
_ENDS_S = 5.0
_POLL_S = 0.01


def build_model_app(rollouts: GymRollouts, *, max_model_len: int, token: str | None) -> FastAPI:
    """The app; every call needs `token` unless it is None."""
    app = FastAPI(title="Midflight policy", openapi_url=None)

    @app.post("/v1/chat/completions")
    async def chat_completions(
        body: Annotated[dict[str, Any], Body()], authorization: Annotated[str, Header()] = ""
    ) -> JSONResponse:
        if token is not None and not hmac.compare_digest(authorization.encode(), f"Bearer {token}".encode()):
            return _error(401, "unauthorized", "send the run's bearer token as the API key")
        key = _key_of(body)
        if key not in rollouts:
            return _error(
                404, "unknown_rollout", f"no rollout {key!r} runs here: send the field {ROLLOUT_FIELD!r} of /run on"
            )
        try:
            messages = _understood(body)
            num_tokens = len(rollouts.prompt(key, messages))
            if num_tokens >= max_model_len:  # the words by which a Gym knows that the conversation has become too long
                return _error(400, "context_length", f"the maximum context length is {max_model_len} tokens")
            answer, completion = await rollouts.complete(key, messages)
        except ValueError as error:
            return _error(400, "invalid_request", str(error))
        except RolloutFailure as error:
            return _error(503 if isinstance(error, InfrastructureFailure) else 422, type(error).__name__, str(error))
        return JSONResponse(_chat_completion(body, answer, num_tokens, completion))

    return app


class ModelServer:
    """The app on a port, in the running event loop."""

    def __init__(self, app: FastAPI, *, host: str, port: int) -> None:
        config = uvicorn.Config(app, log_level="warning", lifespan="off")
        self._server = uvicorn.Server(config)
        self._address = (host, port)
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Serve; its URL. Raises ConfigurationError when the address can't be had. Started again it does nothing."""
        if self._serving is None:
            bound = _bound(*self._address)
            self._serving = asyncio.create_task(self._server.serve(sockets=[bound]), name="model server")
            async with asyncio.timeout(_STARTS_S):
                while not self._server.started:  # noqa: ASYNC110 (uvicorn has no event for it)
                    await asyncio.sleep(_POLL_S)
        host, port = self._server.servers[0].sockets[0].getsockname()[:2]
        return f"http://{host}:{port}/v1"

    async def stop(self) -> None:
        """Serve no more."""
        if self._serving is not None:
            self._server.should_exit = True
            with suppress(TimeoutError):
                await asyncio.wait_for(self._serving, _ENDS_S)


def _bound(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port))
    except OSError as error:
        raise ConfigurationError(
            f"environment.gym_model_host {host!r} and gym_model_port {port} can't be had: {error}; choose others"
        ) from error


def _key_of(body: dict[str, Any]) -> str:
    """The rollout that a call names, as a field of its own or in its metadata."""
    metadata = body.get("metadata")
    return str(body.get(ROLLOUT_FIELD) or (metadata.get(ROLLOUT_FIELD) if isinstance(metadata, dict) else None))


def _understood(body: dict[str, Any]) -> list[ChatMessage]:
    """The messages. ValueError for what can't be given: it is not left out in silence."""
    refused = [name for name in ("stream", "tools", "response_format") if body.get(name)]
    if refused or body.get("n") not in (None, 1):
        raise ValueError(f"{(refused or ['n'])[0]!r} is not supported; send one plain conversation at a time")
    return messages_of(body)


def _chat_completion(body: dict[str, Any], answer: str, num_tokens: int, completion: Completion) -> dict[str, Any]:
    sampled = len(completion.token_ids)
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": answer},
        "finish_reason": completion.finish_reason,
        "logprobs": None,
    }
    return {
        "id": f"chatcmpl-{time.time_ns():x}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": str(body.get("model", "policy")),
        "choices": [choice],
        "usage": {"prompt_tokens": num_tokens, "completion_tokens": sampled, "total_tokens": num_tokens + sampled},
    }


def _error(status: int, code: str, message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "type": code, "param": None, "code": code}}, status)
