"""A request's body while it comes in: kept once, however many pieces it comes in."""

from __future__ import annotations

import tracemalloc

import pytest
from price_keeper.server.request_building import append_to_body, finish_body


@pytest.mark.parametrize("piece", [1, 100, 16_384, 262_144])
def test_body_in_pieces_equals_what_was_sent(piece: int) -> None:
    sent = bytes(range(256)) * 40
    body: object = b""
    for start in range(0, len(sent), piece):
        body = append_to_body(body, sent[start : start + piece])
    assert finish_body(body) == sent
    assert type(finish_body(body)) is bytes


@pytest.mark.parametrize("piece", [100, 16_384])
def test_body_in_pieces_is_stored_once(piece: int) -> None:
    size = 16_000_000 if piece > 1000 else 1_000_000
    data = b"x" * piece
    tracemalloc.start()
    try:
        body: object = b""
        for _ in range(size // piece):
            body = append_to_body(body, bytes(data))
        request = finish_body(body)
        del body
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(request) == size // piece * piece
    assert kept < 1.01 * size
    assert peak < 1.2 * size
