"""Routes whose bodies are JSON, and nothing that only looks like it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from piecegraph.serve.failures import ApiError
from piecegraph.serve.strict_json import NamedTwiceError, read_json


class StrictRequest(Request):
    """FastAPI's. What it raises reaches a client as the cause of FastAPI's own error."""

    async def json(self) -> Any:
        try:
            return read_json(await self.body())
        except NamedTwiceError as error:
            raise ApiError(400, str(error), code="invalid_value", param=error.place) from error
        except ValueError as error:
            raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from error


class StrictRoute(APIRoute):
    """FastAPI's, with such requests."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            return await handle(StrictRequest(request.scope, request.receive))

        return handle_strictly
