"""The application: which path is answered by what, and how errors leave it."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import Field
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp

from piecegraph.base.version import VERSION
from piecegraph.errors import PiecegraphError
from piecegraph.llm.run.detokenizer import Detokenizer
from piecegraph.serve.bodies import Body, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody, conversation_of
from piecegraph.serve.catalog import Catalog, ModelSpec
from piecegraph.serve.chat import ChatCall
from piecegraph.serve.completions import CompletionCall
from piecegraph.serve.embeddings import EmbeddingBody, EmbeddingCall
from piecegraph.serve.failures import ApiError, of_piecegraph, of_validation
from piecegraph.serve.guards import Guards
from piecegraph.serve.messages import CountBody, MessagesBody, MessagesCall, read
from piecegraph.serve.page import page
from piecegraph.serve.record import Record
from piecegraph.serve.responses import ResponsesBody, ResponsesCall
from piecegraph.serve.routes import StrictRoute
from piecegraph.serve.service import Service, accepted
from piecegraph.serve.streams import EventStream, Json, while_connected

router = APIRouter(route_class=StrictRoute)


def make_app(models: Catalog) -> ASGIApp:
    """All endpoints of a server. No page fetches anything from elsewhere, so there is none of FastAPI's."""
    app = FastAPI(title="piecegraph", version=VERSION, docs_url=None, redoc_url=None, default_response_class=Json)
    app.state.models = models
    app.include_router(router)
    for kind, tell in (
        (ApiError, _tell),
        (PiecegraphError, _tell_ours),
        (RequestValidationError, _tell_invalid),
        (HTTPException, _tell_http),
        (Exception, _tell_unexpected),
    ):
        app.add_exception_handler(kind, tell)
    return Guards(app, models.settings, models.counts)


def _models(request: Request) -> Catalog:
    found: Catalog = request.app.state.models
    return found


def _parts(request: Request, body: Any) -> tuple[Service, Record]:
    """The model that a body asks for, and the request's record, which says from here on what its fields are called."""
    record: Record = request.scope["record"]
    record.names = body.names()
    return _models(request).find(body.model), record


# -- of OpenAI's API


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatBody, request: Request) -> Response:
    """Answer a conversation."""
    return await _answer(request, await ChatCall.ask(*_parts(request, body), body), body.stream)


@router.post("/v1/completions")
async def completions(body: CompletionBody, request: Request) -> Response:
    """Go on from texts."""
    return await _answer(request, CompletionCall(*_parts(request, body), body), body.stream)


async def _answer(request: Request, call: Any, streams: bool | None) -> Response:
    await accepted(call.asked)
    return EventStream(call.events()) if streams else Json(await while_connected(request, call.whole()))


@router.post("/v1/responses")
async def responses(body: ResponsesBody, request: Request) -> Response:
    """Answer a conversation."""
    return await _answer(request, await ResponsesCall.ask(*_parts(request, body), body), body.stream)


@router.post("/v1/embeddings")
async def embeddings(body: EmbeddingBody, request: Request) -> Response:
    """Vectors of texts."""
    return await _answer(request, EmbeddingCall(*_parts(request, body), body), False)


@router.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    """Those that are served."""
    return {"object": "list", "data": [service.card() for service in _models(request).all()]}


@router.get("/v1/models/{name:path}")
async def model(name: str, request: Request) -> dict[str, Any]:
    """One of them by its name."""
    return _models(request).find(name).card()


# -- of Anthropic's


@router.post("/v1/messages")
async def messages(body: MessagesBody, request: Request) -> Response:
    """Answer a conversation."""
    return await _answer(request, await MessagesCall.ask(*_parts(request, body), body), body.stream)


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountBody, request: Request) -> dict[str, int]:
    """How long a conversation is."""
    return {"input_tokens": len(await read(*_parts(request, body), body))}


# -- of vLLM's


@router.post("/tokenize")
async def tokenize(body: TokenizeBody, request: Request) -> dict[str, Any]:
    """The tokens of a text, or of a conversation."""
    service, record = _parts(request, body)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give a prompt or messages", code="invalid_value", param="prompt")
    body.check()
    if body.messages is not None:
        tokens = await service.chat_prompt(conversation_of(body.messages), body.chat_template_kwargs or {}, record)
    else:
        tokens = await service.llm.tokens_of(body.prompt or "", add_special_tokens=body.add_special_tokens is not False)
    return {"tokens": tokens, "count": len(tokens), "max_model_len": service.about.max_model_len}


@router.post("/detokenize")
async def detokenize(body: DetokenizeBody, request: Request) -> dict[str, Any]:
    """The text of tokens."""
    service = _models(request).find(body.model)
    vocab_size = service.about.vocab_size
    if not all(0 <= token < vocab_size for token in body.tokens):
        message = f"the vocabulary has tokens 0 to {vocab_size - 1}"
        raise ApiError(400, message, code="invalid_value", param="tokens")
    return {"prompt": Detokenizer(service.llm.tokenizer, skip_special_tokens=False).whole(body.tokens)}


# -- of whoever runs the server


@router.get("/health")
async def health(request: Request) -> Response:
    """Whether there is hope: a server that loads its model, or drains, is well."""
    is_well, word = await _models(request).health_now()
    return Json({"status": word}, 200 if is_well else 503)


@router.get("/ready")
async def ready(request: Request) -> Response:
    """Whether requests are answered now."""
    is_well, word = await _models(request).health_now()
    return Json({"status": word}, 200 if is_well and word == "ready" else 503)


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Counters for Prometheus."""
    return Response(await _models(request).metrics_page(), media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get("/stats")
async def stats(request: Request, model: str | None = None) -> dict[str, Any]:
    """What the engine of a model does now, and has done."""
    return await _models(request).stats(model)


class LoadBody(Body):
    """Of ``/v1/models/load``."""

    model: str = Field(min_length=1)
    path: str = Field(min_length=1)
    memory_fraction: float | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    dtype: str = "auto"


class UnloadBody(Body):
    """Of ``/v1/models/unload``."""

    model: str


@router.post("/v1/models/load")
async def load(body: LoadBody, request: Request) -> dict[str, Any]:
    """Load one more model, and answer when it is there."""
    values = body.model_dump()
    return (await _models(request).load(ModelSpec(name=values.pop("model"), **values))).card()


@router.post("/v1/models/unload")
async def unload(body: UnloadBody, request: Request) -> dict[str, Any]:
    """Unload a model, and answer when its requests have ended."""
    await _models(request).unload(body.model)
    return {"id": body.model, "object": "model", "deleted": True}


@router.get("/", include_in_schema=False)
async def index() -> Response:
    """The page."""
    return page()


@router.get("/version")
async def version() -> dict[str, str]:
    """Of piecegraph."""
    return {"version": VERSION}


# -- errors


async def _tell(request: Request, error: Any) -> Response:
    request.scope["record"].error = error.message
    headers = {"Allow": _allowed(request)} if error.status == 405 else error.headers
    return Json(error.body(request.url.path), error.status, headers)


def _allowed(request: Request) -> str:
    """The methods of a path: of all its routes, for ``/v1/models/load`` is the name of a model, too."""
    known = (*router.routes, *request.app.routes)  # of the second, the schema's
    matching = [route for route in known if route.matches(request.scope)[0] is not Match.NONE]
    return ", ".join(sorted({method for route in matching for method in getattr(route, "methods", None) or ()}))


async def _tell_ours(request: Request, error: Any) -> Response:
    return await _tell(request, of_piecegraph(error, request.scope["record"].names))


async def _tell_invalid(request: Request, error: Any) -> Response:
    return await _tell(request, of_validation(error.errors()))


async def _tell_http(request: Request, error: Any) -> Response:
    if isinstance(error.__cause__, ApiError):  # of a body that cannot be read
        return await _tell(request, error.__cause__)
    if isinstance(error.__cause__, ClientDisconnect):  # nobody is told, but it is written down
        return await _tell(request, ApiError(499, "the client went away"))
    codes = {404: "not_found", 405: "method_not_allowed", 408: "timeout", 413: "body_too_large"}
    messages = {404: f"there is nothing at {request.url.path}", 405: f"{request.method} is not for this path"}
    message = messages.get(error.status_code, str(error.detail))
    return await _tell(request, ApiError(error.status_code, message, code=codes.get(error.status_code)))


async def _tell_unexpected(request: Request, error: Any) -> Response:
    """uvicorn logs it."""
    return await _tell(request, ApiError(500, f"the server failed: {type(error).__name__}", code="internal_error"))
