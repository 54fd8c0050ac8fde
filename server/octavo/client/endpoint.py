"""An OpenAI endpoint as a client sees it: its address and key, whole answers, streams of events, errors."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections.abc import AsyncIterator, Mapping
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from octavo.errors import ConfigError, OctavoError

DEFAULT_URL = "http://127.0.0.1:8000"
KEY_ENV = "OPENAI_API_KEY"
CONNECT_TIMEOUT_S = 30.0
_LONGEST_MESSAGE = 500  # characters of an error that is not in OpenAI's envelope


class EndpointError(OctavoError):
    """The endpoint refused, failed, or could not be reached. ``status``: of HTTP, 0 without an answer."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 0,
        code: str = "connection_error",
        param: str | None = None,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message, param=param, code=code)
        self.status = status
        self.body = body
        self.retry_after = (headers or {}).get("retry-after")
        self.request_id = (headers or {}).get("x-request-id")


class Endpoint:
    """A connection pool to one endpoint; an asynchronous context manager."""

    def __init__(self, url: str, key: str | None = None, *, timeout_s: float | None = None) -> None:
        """``url``: with or without ``/v1``. ``timeout_s``: of a whole answer. Raises ``ConfigError``."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"url is {url!r}: give an address as http://127.0.0.1:8000")
        self.base = url.rstrip("/") + ("" if parts.path.strip("/") else "/v1")
        self.root = self.base.removesuffix("/v1")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S)

    async def __aenter__(self) -> Endpoint:
        self._session = aiohttp.ClientSession(
            headers=self._headers, timeout=self._timeout, connector=aiohttp.TCPConnector(limit=0)
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def models(self) -> list[str]:
        """Names of the models it serves."""
        async with self._request("GET", f"{self.base}/models") as response:
            answer = await _json(response)
        names = [one["id"] for one in answer.get("data", []) if "id" in one]
        if not names:
            raise EndpointError(f"{self.base}/models names no model")
        return names

    async def post(self, path: str, body: Mapping[str, Any]) -> tuple[Any, str | None]:
        """The answer to ``body``, and the request's id at the server. ``path``: below ``/v1``."""
        async with self._request("POST", self.base + path, body) as response:
            return await _json(response), response.headers.get("x-request-id")

    async def stream(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The events of a streamed answer. Raises ``EndpointError`` for an error event, and for a stream
        that ends before its ``[DONE]`` or a finish reason.
        """
        ended = False
        async with self._request("POST", self.base + path, body) as response:
            async for data in sse_data(response.content.iter_any()):
                if data == "[DONE]":
                    return
                event = _object(data)
                if error := event.get("error"):
                    raise _from_envelope(error, response.status, event)
                yield event
                ended = ended or any(one.get("finish_reason") for one in event.get("choices") or ())
        if not ended:
            raise EndpointError("the stream ended before its end", code="stream_cut")

    def _request(self, method: str, url: str, body: Any = None) -> _Request:
        return _Request(self._session, method, url, body)


class _Request:
    """One request, with every failure of it as an ``EndpointError``."""

    def __init__(self, session: aiohttp.ClientSession, method: str, url: str, body: Any) -> None:
        self._sending = session.request(method, url, json=body)
        self._url = url

    async def __aenter__(self) -> aiohttp.ClientResponse:
        try:
            response = await self._sending.__aenter__()
            if response.status >= 400:
                async with response:
                    raise _refusal(response, await response.text(errors="replace"))
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self._lost(error) from error
        return response

    async def __aexit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        await self._sending.__aexit__(kind, error, trace)
        if isinstance(error, (aiohttp.ClientError, TimeoutError)):
            raise self._lost(error) from error

    def _lost(self, error: Exception) -> EndpointError:
        if isinstance(error, TimeoutError):
            return EndpointError(f"{self._url} did not answer in time", code="timeout")
        return EndpointError(f"{self._url} cannot be reached: {error or type(error).__name__}")


async def sse_data(pieces: AsyncIterator[bytes]) -> AsyncIterator[str]:
    """The data of each server-sent event; comments, other fields and events without data are skipped."""
    rest, data = b"", []
    async for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for raw in lines:
            line = raw.removesuffix(b"\r")
            if line.startswith(b"data:"):
                data.append(line[5:].removeprefix(b" "))
            elif not line and data:
                yield b"\n".join(data).decode(errors="replace")
                data = []


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise EndpointError(f"the answer is no JSON object: {text[:_LONGEST_MESSAGE]!r}", code="bad_answer")
    return value


async def _json(response: aiohttp.ClientResponse) -> dict[str, Any]:
    return _object(await response.text(errors="replace"))


def _refusal(response: aiohttp.ClientResponse, text: str) -> EndpointError:
    try:
        body = json.loads(text)
    except ValueError:
        body = text
    envelope = body.get("error", body) if isinstance(body, dict) else text
    return _from_envelope(envelope, response.status, body, response.headers)


def _from_envelope(
    envelope: Any, status: int, body: Any, headers: Mapping[str, str] | None = None
) -> EndpointError:
    fields = envelope if isinstance(envelope, dict) else {"message": envelope}
    message = str(fields.get("message") or body)[:_LONGEST_MESSAGE]
    code, param = fields.get("code") or fields.get("type") or f"status_{status}", fields.get("param")
    return EndpointError(
        f"status {status}: {message}" if status >= 400 else message,
        status=status,
        code=str(code),
        param=param if isinstance(param, str) else None,
        body=body,
        headers=headers,
    )


def add_endpoint_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default=DEFAULT_URL, help=f"of the endpoint (default: {DEFAULT_URL})")
    parser.add_argument("--model", help="the model to ask (default: the first that the endpoint serves)")
    parser.add_argument("--api-key", default=os.environ.get(KEY_ENV), help=f"default: ${KEY_ENV}")


async def choose_model(endpoint: Endpoint, model: str | None) -> str:
    return model or (await endpoint.models())[0]


def run(main: Any) -> Any:
    """Run a command's coroutine; Ctrl-C ends it with 130, as shells expect."""
    try:
        return asyncio.run(main)
    except KeyboardInterrupt:
        return 130
