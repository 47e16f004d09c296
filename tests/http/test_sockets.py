"""Raw bytes against the real server: bounds before a request exists, departures, and an orderly end."""

import contextlib
import json
import socket
import time

import pytest

from branchline.api import protocol
from branchline.api.serve import listen
from branchline.base.config import ServerConfig
from branchline.base.errors import ConfigError
from tests.support.live_server import live_server


@pytest.fixture(scope="module")
def server():
    with live_server(max_body_bytes=10_000) as server:
        yield server
        server.wait_until(lambda: server.text.is_idle)


def connect(server):
    return socket.create_connection(("127.0.0.1", server.port), timeout=10)


def head(method="POST", path="/v1/completions", extra=b"", length=None):
    lines = b"%b %b HTTP/1.1\r\nhost: 127.0.0.1\r\n%b" % (method.encode(), path.encode(), extra)
    return lines + (b"" if length is None else b"content-length: %d\r\n" % length) + b"\r\n"


def read_all(sock):
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while data := sock.recv(65536):
            parts.append(data)
    return b"".join(parts)


def exchange(server, data):
    """Send, read until the server closes."""
    with connect(server) as sock:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            sock.sendall(data)
        return read_all(sock)


def status_and_error(answer):
    first, _, body = answer.partition(b"\r\n\r\n")
    return int(first.split()[1]), json.loads(body)["error"]


def test_announced_body_is_refused_before_it_is_read(server):
    status, error = status_and_error(exchange(server, head(length=10_001)))
    assert status == 413
    assert error["type"] == "invalid_request_error"


def test_chunked_body_is_refused_while_it_is_read(server):
    chunks = b"".join(b"%x\r\n%b\r\n" % (1000, b"a" * 1000) for _ in range(11))
    status, _ = status_and_error(exchange(server, head(extra=b"transfer-encoding: chunked\r\n") + chunks))
    assert status == 413


def test_not_http(server):
    status, error = status_and_error(exchange(server, b"\x16\x03\x01\x02\x00\x01\x00 hello\r\n\r\n"))
    assert status == 400
    assert error["message"]


@pytest.mark.parametrize("size", [33_000, 300_000])
def test_headers_are_bounded(server, size):
    status, _ = status_and_error(
        exchange(server, head("GET", "/health", b"x: " + b"a" * size + b"\r\nconnection: close\r\n"))
    )
    assert status == 431


def test_an_endless_header_is_cut_off(server):
    answer = exchange(server, b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\nx: " + b"a" * 2_000_000)
    assert answer.startswith(b"HTTP/1.1 431") or answer == b""  # empty: the reset overtook the answer


def test_the_target_is_bounded(server):
    answer = exchange(server, head("GET", "/health?" + "a" * 9000, b"connection: close\r\n"))
    assert status_and_error(answer)[0] == 414


def test_slow_heads_are_cut_off(server, monkeypatch):
    monkeypatch.setattr(protocol, "HEAD_TIMEOUT_S", 0.1)
    status, _ = status_and_error(exchange(server, b"GET /health HTTP/1.1\r\nhost: 127.0"))
    assert status == 408
    assert exchange(server, b"") == b""


def test_connections_are_bounded(server, monkeypatch):
    monkeypatch.setattr(protocol, "MAX_CONNECTIONS", 1)
    with connect(server) as first:
        first.sendall(head("GET", "/health"))
        assert first.recv(100).startswith(b"HTTP/1.1 200")
        assert status_and_error(exchange(server, b""))[0] == 503


def test_keep_alive_and_headers(server):
    with connect(server) as sock:
        for _ in range(3):
            sock.sendall(head("GET", "/health"))
            answer = sock.recv(65536)
            assert answer.startswith(b"HTTP/1.1 200")
            assert b"\r\nserver:" not in answer
            assert b"x-request-id: " in answer


def test_reset_during_a_whole_answer(server):
    """A client that vanishes while it waits for an answer that is not streamed."""
    server.text.hold = True
    try:
        body = b'{"prompt":"a","n":3}'
        with connect(server) as sock:
            sock.sendall(head(length=len(body)) + body)
            server.wait_until(lambda: len(server.text.live) == 3)
        start = time.monotonic()
        server.wait_until(lambda: server.text.is_idle)
        assert time.monotonic() - start < 1
    finally:
        server.text.hold = False


def test_a_half_sent_body_leaves_nothing(server):
    before = len(server.text.received)
    with connect(server) as sock:
        sock.sendall(head(length=100) + b'{"prompt":')
        time.sleep(0.05)
    server.wait_until(lambda: server.text.is_idle)
    assert len(server.text.received) == before


def test_a_taken_port_is_one_sentence():
    with listen(ServerConfig(port=0)) as taken, pytest.raises(ConfigError, match="cannot listen on"):
        listen(ServerConfig(port=taken.getsockname()[1]))


def test_an_unknown_host_is_one_sentence():
    with pytest.raises(ConfigError, match="cannot"):
        listen(ServerConfig(host="192.0.2.1"))


def stream_request():
    body = b'{"prompt":"a","stream":true}'
    return head(length=len(body)) + body


def test_drain_lets_requests_finish():
    with live_server(drain_timeout_s=20) as server:
        server.text.hold = True
        with connect(server) as sock:
            sock.sendall(stream_request())
            server.wait_until(lambda: server.text.live)
            server.stop()
            server.wait_until(lambda: any(getattr(m, "verb", "") == "drain" for m in server.text.received))
            with connect(server) as late:
                late.sendall(stream_request())
                assert late.recv(100).startswith(b"HTTP/1.1 503")
            (request_id,) = list(server.text.live)
            server.call(server.text.end, request_id)
            answer = read_all(sock)
        server.join()
        assert server.error is None
    assert b'"finish_reason":"stop"' in answer
    assert b"data: [DONE]" in answer


def test_what_outlives_the_drain_is_told_so():
    with live_server(drain_timeout_s=0.1) as server:
        server.text.hold = True
        with connect(server) as sock:
            sock.sendall(stream_request())
            server.wait_until(lambda: server.text.live)
            server.stop()
            answer = read_all(sock)
        server.join()
    assert b'"error":{' in answer
    assert b"[DONE]" not in answer


def test_a_second_stop_is_at_once():
    with live_server(drain_timeout_s=60) as server:
        server.text.hold = True
        with connect(server) as sock:
            sock.sendall(stream_request())
            server.wait_until(lambda: server.text.live)
            start = time.monotonic()
            server.stop()
            server.stop()
            server.join()
            assert time.monotonic() - start < 4
