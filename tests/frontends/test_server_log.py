"""What a client can write into the log by sending what cannot be read: one line, and never a traceback."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest

from baton.frontends import server_log
from baton.ipc.log import Adopted, make_log
from tests.frontends.conftest import House


def logged(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """What the log was told of connections; asyncio's own debugging is left out."""
    return [record for record in caplog.records if record.name.startswith(("aiohttp", "baton"))]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/nowhere"])
@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd"])
async def test_a_body_that_cannot_be_decoded_is_one_line_in_the_log(
    house: House, caplog: pytest.LogCaptureFixture, encoding: str, path: str
) -> None:
    headers = {"Content-Encoding": encoding, "Content-Type": "application/json"}
    async with house.client.post(house.url + path, data=b'{"a": 1}', headers=headers) as response:
        assert response.status in (400, 404)
    async with asyncio.timeout(5):
        while not logged(caplog):
            await asyncio.sleep(0)
    (record,) = logged(caplog)
    assert record.levelname == "WARNING" and record.getMessage().startswith("a request could not be read: ")
    assert "Traceback" not in caplog.text and "Unhandled" not in caplog.text


@pytest.mark.parametrize(
    "nonsense",
    [
        b"GET / HTTP/1.1\r\nbad header\r\n\r\n",
        b"GET / HTTP/9.x\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nbad header\r\n",
    ],
)
async def test_a_request_that_cannot_be_read_is_one_line_in_the_log(
    house: House, caplog: pytest.LogCaptureFixture, nonsense: bytes
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(house.url.rpartition(":")[2]))
    writer.write(nonsense)
    async with asyncio.timeout(5):
        assert b" 400 " in await reader.readline()
    writer.close()
    (record,) = logged(caplog)
    assert record.levelname == "WARNING" and not record.exc_info
    assert "Traceback" not in caplog.text and "bad header" not in caplog.text


async def test_an_error_of_the_server_keeps_its_traceback(house: House, caplog: pytest.LogCaptureFixture) -> None:
    try:
        raise RuntimeError("ours")
    except RuntimeError:
        server_log.log.exception("Unhandled exception")
    (record,) = logged(caplog)
    assert record.levelname == "ERROR" and "RuntimeError: ours" in caplog.text


def test_what_libraries_log_is_a_line_of_the_process_log(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.Logger("library")
    logger.addHandler(Adopted(make_log("frontend-0", "info")))
    logger.info("not said")
    logger.warning("a request could not be read: %s", "BadStatusLine")
    try:
        raise RuntimeError("ours")
    except RuntimeError:
        logger.exception("it broke")
    first, second = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert first.pop("timestamp")
    assert first == {
        "process": "frontend-0",
        "level": "warning",
        "event": "logged",
        "logger": "library",
        "detail": "a request could not be read: BadStatusLine",
    }
    assert second["level"] == "error" and "RuntimeError: ours" in second["exception"]
