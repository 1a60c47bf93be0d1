"""Connections to DynamoDB on which every answer is to what was asked last.

aiohttp takes an idle connection for good as long as it stands. What came on it unasked, the same answer once more or
anything else, it would hand out as the answer to the next call: a read would find another item, and a write that never
was would be thought done.
"""

from __future__ import annotations

from asyncio import AbstractEventLoop
from collections import deque
from functools import partial
from typing import Any

from aiohttp import ServerDisconnectedError, TCPConnector
from aiohttp.client_proto import ResponseHandler

from price_keeper.aws_session import HostnameCheckingSession

_REQUEST_ID_HEADER = "x-amzn-requestid"  # that no two answers share
_MAX_REMEMBERED_IDS = 100  # answers of one connection


class _StrictResponseHandler(ResponseHandler):
    def __init__(self, loop: AbstractEventLoop) -> None:
        super().__init__(loop)
        self._seen_request_ids: deque[str] = deque(maxlen=_MAX_REMEMBERED_IDS)  # by their numbers
        self._is_response_expected = False  # and has not begun to answer
        self._has_unsolicited_data = False

    def set_response_params(self, **params: Any) -> None:
        self._is_response_expected = True
        super().set_response_params(**params)

    def data_received(self, data: bytes) -> None:
        if data and not self._is_response_expected and (self._payload is None or self._payload.is_eof()):
            self._has_unsolicited_data = True
        super().data_received(data)

    def is_connected(self) -> bool:
        """Asked before each use, and answered with no where something came that nobody asked for."""
        return super().is_connected() and not (self._has_unsolicited_data or self._buffer or self._tail)

    def feed_data(self, data: Any, size: int = 0) -> None:
        request_id = data[0].headers.get(_REQUEST_ID_HEADER, "")
        if request_id in self._seen_request_ids:  # what was asked meanwhile has no answer yet
            self.set_exception(ServerDisconnectedError("an answer that was given before"))
            if self.transport is not None:
                self.transport.abort()
        elif self.exception() is None:
            self._is_response_expected = False
            if request_id:
                self._seen_request_ids.append(request_id)
            super().feed_data(data, size)


def _create_handler(loop: AbstractEventLoop) -> ResponseHandler:
    return _StrictResponseHandler(loop)


class StrictResponseSession(HostnameCheckingSession):
    def _create_connector(self, proxy_url: str | None) -> TCPConnector:
        connector: TCPConnector = super()._create_connector(proxy_url)
        connector._factory = partial(_create_handler, connector._loop)
        return connector
