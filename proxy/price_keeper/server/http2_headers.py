"""HTTP/2's header lists (RFC 9113, section 8, and RFC 7541): decoded, checked and made a `Request`; and encoded. Pure.

Malformed lists raise ProtocolViolation, which ends the connection. Lists that are well-formed but that this server does
not serve raise InvalidRequest, which is a response on their stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Final

from hpack import HPACKError
from hpack.huffman_table import decode_huffman
from hpack.table import HeaderTable

from price_keeper.errors import InvalidRequest
from price_keeper.exchange import Header, Request
from price_keeper.server.http2_frames import ErrorCode, ProtocolViolation
from price_keeper.server.request_building import SCHEMES, find_host_error
from price_keeper.server.server_limits import CACHED_STRINGS, MAX_CACHED_STRING_BYTES

HEADER_ENTRY_BYTES: Final = 32  # overhead per header, as RFC 9113 counts a header list

# Sent once, before the first response: "the table has 0 bytes". Without a table there is nothing to search, and no
# other side of a connection that could fill it.
EMPTY_TABLE: Final = b"\x20"

_NAME_CHARACTERS: Final = bytes(code for code in range(0x21, 0x7F) if chr(code) not in ":ABCDEFGHIJKLMNOPQRSTUVWXYZ")
_CONTROLS: Final = bytes(code for code in range(0x20) if code != 0x09) + b"\x7f"
_LINE_BREAKS: Final = b"\0\r\n"  # in a value they are malformed; other control characters are merely not served
_CONNECTION_HEADERS: Final = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"}
)
_PSEUDO_HEADERS: Final = frozenset({b":method", b":scheme", b":authority", b":path"})
_MAX_LENGTH_DIGITS: Final = 18  # of a content-length
_STATUS_INDEXES: Final = {200: 8, 204: 9, 206: 10, 304: 11, 400: 12, 404: 13, 500: 14}  # in HPACK's static table

# The first byte of a header in a block (RFC 7541, 6).
_INDEXED: Final = 0x80
_ADDED_TO_TABLE: Final = 0x40
_TABLE_SIZE: Final = 0x20
_INTEGER_SHIFTS: Final = (0, 7, 14, 21, 28)  # of an integer's bytes behind the first; more are an attack
_SHORT_LENGTHS: Final = [bytes((length,)) for length in range(0x7F)]


class HeaderDecoder:
    """Decodes the header blocks of one connection (RFC 7541), over the tables of the library hpack.

    hpack's own decoder takes three times as long, and ten times for a new connection: it does not remember what the
    same clients send again and again in Huffman's code.
    """

    def __init__(self, max_list_bytes: int) -> None:
        self._max_list_bytes = max_list_bytes
        self.list_bytes = 0  # of the header list decoded last, as RFC 9113 counts them
        self._table = HeaderTable()  # of the client; at most 4 kB, the protocol's default

    def decode(self, block: bytes) -> list[Header]:
        """Raises ProtocolViolation."""
        try:
            return self._decode(block)
        except (HPACKError, IndexError) as failure:  # an IndexError is the end of the block
            raise ProtocolViolation(ErrorCode.COMPRESSION_ERROR, f"a header block is malformed: {failure}") from None

    def _decode(self, block: bytes) -> list[Header]:
        table = self._table
        headers: list[Header] = []
        list_bytes = position = 0
        while position < len(block):
            first = block[position]
            if first & _INDEXED:
                index, position = _decode_integer(block, position, 0x7F)
                header = table.get_by_index(index)
            elif first & _TABLE_SIZE and not first & _ADDED_TO_TABLE:
                size, position = _decode_integer(block, position, 0x1F)
                if headers or size > HeaderTable.DEFAULT_SIZE:
                    raise HPACKError("a table's size changes before the first header, to 4096 at most")
                table.maxsize = size
                continue
            else:
                index, position = _decode_integer(block, position, 0x3F if first & _ADDED_TO_TABLE else 0x0F)
                if index:
                    name = table.get_by_index(index)[0]
                else:
                    name, position = _decode_string(block, position)
                value, position = _decode_string(block, position)
                header = (name, value)
                if first & _ADDED_TO_TABLE:
                    table.add(name, value)
            headers.append(header)
            list_bytes += len(header[0]) + len(header[1]) + HEADER_ENTRY_BYTES
            if list_bytes > self._max_list_bytes:
                raise ProtocolViolation(ErrorCode.ENHANCE_YOUR_CALM, "a header list is far beyond the limit")
        self.list_bytes = list_bytes
        return headers


def _decode_integer(block: bytes, position: int, mask: int) -> tuple[int, int]:
    """The integer whose first bits are those of `mask` in the byte at `position`, and the position behind it."""
    number = block[position] & mask
    position += 1
    if number == mask:
        for shift in _INTEGER_SHIFTS:
            byte = block[position]
            position += 1
            number += (byte & 0x7F) << shift
            if byte < 0x80:
                return number, position
        raise HPACKError("a number has too many bytes")
    return number, position


def _decode_string(block: bytes, position: int) -> tuple[bytes, int]:
    is_huffman = block[position] & 0x80
    length, start = _decode_integer(block, position, 0x7F)
    end = start + length
    if end > len(block):
        raise HPACKError("a string is cut short")
    encoded = block[start:end]
    if not is_huffman:
        return encoded, end
    return (_decode_huffman_cached(encoded) if length <= MAX_CACHED_STRING_BYTES else decode_huffman(encoded)), end


_decode_huffman_cached = lru_cache(CACHED_STRINGS)(decode_huffman)


def build_request(headers: Sequence[Header], max_bytes: int) -> Request:
    """Raises ProtocolViolation or InvalidRequest."""
    pseudo: dict[bytes, bytes] = {}
    headers_by_name: dict[bytes, bytes] = {}
    cookies: list[bytes] = []  # all but the first
    repeated: set[bytes] = set()
    for name, value in headers:
        if name[:1] == b":":
            if name in pseudo or name not in _PSEUDO_HEADERS or headers_by_name:
                raise _malformed("pseudo-headers are known ones, once each, before all others")
            pseudo[name] = value
        elif name not in headers_by_name:
            headers_by_name[name] = value
        elif name == b"cookie":  # RFC 9113, 8.2.3: clients split it for the sake of compression
            cookies.append(value)
        else:
            repeated.add(name)
            if name == b"content-length" and value != headers_by_name[name]:
                raise _malformed("a body has one length")
    if cookies:  # joined at once: one by one, a thousand take milliseconds
        headers_by_name[b"cookie"] = b"; ".join((headers_by_name[b"cookie"], *cookies))
    _check_fields(headers, headers_by_name)
    _check_pseudo_headers(pseudo, headers_by_name, repeated)
    _check_served(headers, pseudo, repeated, max_bytes)
    headers_by_name.setdefault(b"host", pseudo.get(b":authority", b""))
    host_error = find_host_error(headers_by_name[b"host"])
    if host_error is not None:
        raise InvalidRequest(host_error)
    return Request(pseudo[b":method"], pseudo[b":path"], headers_by_name, frozenset(repeated))


def check_trailers(headers: Sequence[Header]) -> None:
    """Trailers are discarded, but must be well-formed. Raises ProtocolViolation."""
    if any(name[:1] == b":" for name, _ in headers):
        raise _malformed("trailers have no pseudo-headers")
    _check_fields(headers, dict(headers))


def _check_fields(headers: Sequence[Header], plain: dict[bytes, bytes]) -> None:
    """Checks the characters of all fields, and the names of `plain`, which are those that are no pseudo-headers."""
    if b"".join(plain).translate(None, _NAME_CHARACTERS) or b"" in plain:
        raise _malformed("a header's name is in lower case and has no special characters")
    values = [value for _, value in headers]
    together = b"".join(values)
    if len(together.translate(None, _LINE_BREAKS)) != len(together):
        raise _malformed("a header's value has no line breaks and no zero bytes")
    if any(value != value.strip(b" \t") for value in values):
        raise _malformed("a header's value neither begins nor ends with a space")
    if not _CONNECTION_HEADERS.isdisjoint(plain):
        raise _malformed("headers of a connection have no place in HTTP/2")
    if b"te" in plain and any(name == b"te" and value.lower() != b"trailers" for name, value in headers):
        raise _malformed("the only value of TE is trailers")


def _check_pseudo_headers(pseudo: dict[bytes, bytes], plain: dict[bytes, bytes], repeated: set[bytes]) -> None:
    method, path = pseudo.get(b":method"), pseudo.get(b":path")
    has_target = method != b"CONNECT"
    if method is None or path == b"" or (b":scheme" in pseudo, path is not None) != (has_target, has_target):
        raise _malformed("a request has a method, a scheme and a path; CONNECT has only a method")
    authority, host = pseudo.get(b":authority"), plain.get(b"host")
    if (authority is None and host is None) or b"host" in repeated:
        raise _malformed("a request has one host")
    if authority is not None and host is not None and authority != host:
        raise _malformed("the headers Host and :authority are the same")
    length = plain.get(b"content-length")
    if length is not None and not (length.isdigit() and len(length) <= _MAX_LENGTH_DIGITS):
        raise _malformed("a content-length is a number")


def _check_served(headers: Sequence[Header], pseudo: dict[bytes, bytes], repeated: set[bytes], max_bytes: int) -> None:
    together = b"".join([part for header in headers for part in header])
    if len(together) + HEADER_ENTRY_BYTES * len(headers) > max_bytes:
        raise InvalidRequest(f"a request's head has at most {max_bytes} bytes")
    if len(together.translate(None, _CONTROLS)) != len(together):
        raise InvalidRequest("a header's value has no control characters")
    if b"content-length" in repeated:
        raise InvalidRequest("a body has one length")
    if pseudo.get(b":scheme") not in SCHEMES:  # CONNECT has none
        raise InvalidRequest("a request's scheme is http or https")
    line = pseudo[b":method"] + pseudo[b":path"]
    if b" " in line or b"\t" in line:
        raise InvalidRequest("neither a method nor a path has spaces")


def _malformed(rule: str) -> ProtocolViolation:
    return ProtocolViolation(ErrorCode.PROTOCOL_ERROR, rule)


def encode_response_head(status: int, headers: Iterable[Header], length: int | None) -> bytes:
    """The header block of a response, of literals only. `length` becomes its content-length."""
    index = _STATUS_INDEXES.get(status)
    fields = [b"\x08\x03%d" % status if index is None else bytes((0x80 | index,))]
    for name, value in headers:
        value = value.strip()  # an upstream server may have padded it, which HTTP/2 forbids
        fields += (_encode_name(name), _encode_length(len(value)), value)
    if length is not None:
        digits = b"%d" % length
        fields += (_encode_name(b"content-length"), _encode_length(len(digits)), digits)
    return b"".join(fields)


@lru_cache(1024)  # nearly all responses have the same few names; any other only costs its encoding
def _encode_name(name: bytes) -> bytes:
    name = name.strip().lower()
    return b"\x00" + _encode_length(len(name)) + name


def _encode_length(length: int) -> bytes:
    """An integer with a prefix of seven bits (RFC 7541, 5.1), without the bit that says Huffman."""
    if length < 0x7F:
        return _SHORT_LENGTHS[length]
    encoded = bytearray(b"\x7f")
    length -= 0x7F
    while length >= 0x80:
        encoded.append(0x80 | length & 0x7F)
        length >>= 7
    encoded.append(length)
    return bytes(encoded)
