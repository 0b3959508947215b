"""How to reach a broker: SASL and TLS settings, and one line on why it can't be reached."""

from __future__ import annotations

import asyncio
import ssl
from typing import Annotated, Any, Literal

import msgspec
from aiokafka import errors
from aiokafka.conn import create_conn
from aiokafka.helpers import create_ssl_context
from aiokafka.protocol.metadata import MetadataRequest
from msgspec import Meta

from rollstream.shared.config import ConfigError, read_secret


class Security(msgspec.Struct, frozen=True):
    """SASL and TLS to the brokers; the password itself is never a setting."""

    security_protocol: Annotated[
        Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"],
        Meta(description="how to talk to the brokers"),
    ] = "PLAINTEXT"
    sasl_mechanism: Annotated[
        Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"], Meta(description="with SASL_*")
    ] = "SCRAM-SHA-512"
    sasl_username: Annotated[str, Meta(description="with SASL_*")] = ""
    sasl_password_env: Annotated[
        str | None, Meta(description="environment variable that holds the password")
    ] = None
    sasl_password_file: Annotated[
        str | None, Meta(description="file that holds the password")
    ] = None
    ssl_ca_file: Annotated[
        str | None, Meta(description="CA certificates, PEM; default: the system's")
    ] = None
    ssl_cert_file: Annotated[
        str | None, Meta(description="client certificate, PEM, for mutual TLS")
    ] = None
    ssl_key_file: Annotated[str | None, Meta(description="client key, PEM")] = None


def client_options(security: Security) -> dict[str, Any]:
    """The keyword arguments that every aiokafka client gets.

    Raises ConfigError where a secret or a file is missing.
    """
    protocol = security.security_protocol
    options: dict[str, Any] = {"security_protocol": protocol}
    if protocol in ("SSL", "SASL_SSL"):
        try:
            options["ssl_context"] = create_ssl_context(
                cafile=security.ssl_ca_file,
                certfile=security.ssl_cert_file,
                keyfile=security.ssl_key_file,
            )
        except OSError as error:
            raise ConfigError(
                "ssl_ca_file, ssl_cert_file, ssl_key_file",
                f"{security.ssl_ca_file}, {security.ssl_cert_file}, {security.ssl_key_file}",
                f"give readable PEM files ({error})",
            ) from error
    if protocol.startswith("SASL"):
        password = read_secret(
            "sasl_password", security.sasl_password_env, security.sasl_password_file
        )
        if not security.sasl_username:
            raise ConfigError("sasl_username", "(not given)", f"{protocol} needs one")
        if password is None:
            raise ConfigError(
                "sasl_password", "(not given)", "give sasl_password_env or sasl_password_file"
            )
        options |= {
            "sasl_mechanism": security.sasl_mechanism,
            "sasl_plain_username": security.sasl_username,
            "sasl_plain_password": password,
        }
    return options


async def check(
    bootstrap: str, options: dict[str, Any] | None = None, timeout_s: float = 5.0
) -> str | None:
    """None when a broker of the list can be used, else why not, in one line.

    aiokafka says "Unable to bootstrap" to a closed port, an untrusted certificate and a wrong
    password alike; this goes step by step. It also tries the address that the broker advertises.
    """
    reasons = []
    for address in (part.strip() for part in bootstrap.split(",") if part.strip()):
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            reasons.append(f"{address}: write host:port")
            continue
        try:
            async with asyncio.timeout(timeout_s):
                reason = await _why_not(host.strip("[]"), int(port), options or {})
        except TimeoutError:
            reason = f"no answer within {timeout_s:g} s (a firewall, or another protocol?)"
        if reason is None:
            return None
        reasons.append(f"{address}: {reason}")
    return "; ".join(reasons) or "no bootstrap servers given: write host:port"


async def _why_not(host: str, port: int, options: dict[str, Any]) -> str | None:
    reason = await _closed(host, port)
    if reason:
        return reason
    try:
        connection = await create_conn(host, port, **options)
    except (OSError, errors.KafkaError, AssertionError, IndexError) as error:
        return await _explain(error, host, port, options)
    try:
        # An Any: the type of the answer depends on the version that the broker speaks.
        metadata: Any = await connection.send(MetadataRequest([]))
    except errors.KafkaError as error:
        return await _explain(error, host, port, options)
    finally:
        connection.close()
    for _, advertised, advertised_port, *_ in metadata.brokers:
        if reason := await _closed(advertised, advertised_port):
            return (
                f"it answers, but calls itself {advertised}:{advertised_port} "
                f"(advertised.listeners), which is not reachable from here: {reason}"
            )
    return None


async def _closed(host: str, port: int) -> str | None:
    """Why there is no TCP connection, None when there is one."""
    try:
        _, writer = await asyncio.open_connection(host, port)
    except OSError as error:
        refused = isinstance(error, ConnectionRefusedError)
        return f"no connection ({'refused' if refused else error.strerror or error})"
    writer.close()
    return None


async def _explain(error: Exception, host: str, port: int, options: dict[str, Any]) -> str:
    protocol: str = options.get("security_protocol", "PLAINTEXT")
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted ({error.verify_message}): give ssl_ca_file"
    if isinstance(error, ssl.SSLError | ConnectionResetError) and protocol.endswith("SSL"):
        return f"the TLS handshake failed ({str(error) or 'cut off'}): is this a TLS port?"
    if isinstance(error, errors.UnsupportedSaslMechanismError):
        return f"it does not offer {options.get('sasl_mechanism')}: set another sasl_mechanism"
    if isinstance(error, errors.SaslAuthenticationFailed):
        return f"SASL refused the user or the password ({error})"
    if isinstance(error, errors.IllegalSaslStateError):
        return "this port does not use SASL: set security_protocol to PLAINTEXT or SSL"
    if protocol.endswith("PLAINTEXT") and await _speaks_tls(host, port):
        return "this port speaks TLS: set security_protocol to SSL or SASL_SSL"
    if not protocol.startswith("SASL") and isinstance(error, errors.KafkaConnectionError):
        return "it closed the connection: it may want SASL, see security_protocol"
    return f"{type(error).__name__}: {error}"


async def _speaks_tls(host: str, port: int) -> bool:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(host, port, ssl=context), 2)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True
