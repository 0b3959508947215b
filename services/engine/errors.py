"""Refusals in the shape that OpenAI clients read."""

from __future__ import annotations

import traceback

import msgspec
from aiohttp import web


class ApiError(Exception):
    """A request that can't be served; `param` names the field at fault."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        status: int = 400,
        kind: str = "BadRequestError",
    ) -> None:
        super().__init__(message)
        self.param = param
        self.status = status
        self.kind = kind


def error_body(error: ApiError) -> bytes:
    """The JSON of an error answer."""
    return msgspec.json.encode(
        {
            "error": {
                "message": str(error), "type": error.kind,
                "param": error.param, "code": error.status,
            }
        }
    )


@web.middleware
async def error_middleware(request: web.Request, handler) -> web.StreamResponse:
    """Turns refusals into JSON answers, aiohttp's own (404, 405, 413) included."""
    try:
        return await handler(request)
    except ApiError as error:
        refusal = error
    except ConnectionResetError:
        raise  # the client has gone
    except web.HTTPException as error:
        if error.status < 400:
            raise
        kind = "NotFoundError" if error.status == 404 else "BadRequestError"
        refusal = ApiError(error.reason, status=error.status, kind=kind)
    except Exception as error:
        traceback.print_exc()
        refusal = ApiError(f"{error!r}; the log says more", status=500, kind="InternalServerError")
    return web.Response(
        body=error_body(refusal), status=refusal.status, content_type="application/json"
    )
