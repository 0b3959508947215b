"""Why a broker can't be reached, in one line."""

import asyncio
import contextlib

import pytest

from rollstream.shared.brokers.broker import free_port
from rollstream.shared.brokers.connection import Security, check, client_options
from rollstream.shared.config import ConfigError


@contextlib.asynccontextmanager
async def server(answer):
    """A TCP server on loopback; `answer(reader, writer)` is what it does with a connection."""
    listening = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    finally:
        listening.close()


def test_plaintext_needs_nothing():
    assert client_options(Security()) == {"security_protocol": "PLAINTEXT"}


def test_sasl_takes_the_password_from_a_variable_or_a_file(monkeypatch, tmp_path):
    monkeypatch.setenv("KAFKA_PASSWORD", "secret")
    (tmp_path / "password").write_text("other\n")
    security = Security(
        security_protocol="SASL_SSL", sasl_mechanism="SCRAM-SHA-256", sasl_username="me",
        sasl_password_env="KAFKA_PASSWORD",
    )
    options = client_options(security)
    assert options.pop("ssl_context").check_hostname
    assert options == {
        "security_protocol": "SASL_SSL", "sasl_mechanism": "SCRAM-SHA-256",
        "sasl_plain_username": "me", "sasl_plain_password": "secret",
    }
    from_file = Security(
        security_protocol="SASL_PLAINTEXT", sasl_username="me",
        sasl_password_file=str(tmp_path / "password"),
    )
    assert client_options(from_file)["sasl_plain_password"] == "other"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"security_protocol": "SASL_SSL"}, "sasl_username"),
        ({"security_protocol": "SASL_SSL", "sasl_username": "me"}, "sasl_password"),
        ({"security_protocol": "SSL", "ssl_ca_file": "/none.pem"}, r"ssl_ca_file.*/none\.pem"),
    ],
)
def test_what_is_missing_is_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        client_options(Security(**settings))


async def test_a_good_broker_has_no_reason_and_one_of_a_list_is_enough(broker):
    assert await check(broker) is None
    assert await check(f"127.0.0.1:{free_port()},{broker}") is None


async def test_a_closed_port():
    address = f"127.0.0.1:{free_port()}"
    assert await check(address) == f"{address}: no connection (refused)"


@pytest.mark.parametrize("bootstrap", ["", "broker", "broker:kafka"])
async def test_not_an_address(bootstrap):
    assert "write host:port" in str(await check(bootstrap))


async def test_a_port_that_never_answers():
    async def silent(reader, writer):
        await reader.read()
        writer.close()

    async with server(silent) as address:
        assert "no answer within 0.3 s" in str(await check(address, timeout_s=0.3))


async def test_a_broker_that_hangs_up_may_want_sasl():
    async def hang_up(reader, writer):
        await reader.read(4)
        writer.close()

    async with server(hang_up) as address:
        assert "it may want SASL" in str(await check(address))


async def test_tls_to_a_port_without_tls():
    async def hang_up(reader, writer):
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    options = client_options(Security(security_protocol="SSL"))
    async with server(hang_up) as address:
        assert "TLS handshake failed" in str(await check(address, options))


@pytest.mark.kafka
async def test_sasl_to_a_broker_without_it(real_kafka, monkeypatch):
    monkeypatch.setenv("KAFKA_PASSWORD", "x")
    options = client_options(Security(
        security_protocol="SASL_PLAINTEXT", sasl_username="me", sasl_password_env="KAFKA_PASSWORD",
    ))
    assert "does not use SASL" in str(await check(real_kafka, options))
