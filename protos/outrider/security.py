"""TLS and tokens: what a server demands, what a client shows, and their flags.

Importing this takes grpc alone. Files are read when a server or channel is made; what cannot be
used is refused by file and flag, and no message contains a key or a token.
"""

from __future__ import annotations

import argparse
import ipaddress
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import grpc

from outrider.guard import STREAMS_PER_PEER, Guard, Tokens, read_tokens

MOST_STREAMS_PER_PEER = 1 << 20


class SecurityError(ValueError):
    """A certificate, key or token file that cannot be used."""


@dataclass(frozen=True)
class ServerSecurity:
    """What a port demands of its callers; by default nothing, so listen on loopback."""

    certificate: Path | None = None  # PEM, own certificate first, then intermediates
    key: Path | None = None  # PEM, without a password
    client_ca: Path | None = None  # PEM; callers must show a certificate that it signed
    token_file: Path | None = None
    streams_per_peer: int = STREAMS_PER_PEER

    @classmethod
    def of(cls, flags: argparse.Namespace) -> Self:
        """From the flags of `add_server_arguments`."""
        return cls(
            _path(flags.tls_cert),
            _path(flags.tls_key),
            _path(flags.tls_ca),
            _path(flags.token_file),
            flags.max_streams_per_peer,
        )

    def credentials(self) -> grpc.ServerCredentials | None:
        """For the port; None is plain text.

        Raises:
            SecurityError: Files that are missing, do not fit, or cannot be read.
        """
        if self.certificate is None and self.key is None:
            if self.client_ca is not None:
                raise SecurityError("--tls-ca: expected --tls-cert and --tls-key beside it")
            return None
        pair = _key_pair("--tls-cert", self.certificate, "--tls-key", self.key)
        ca = _authority("--tls-ca", self.client_ca)
        return grpc.ssl_server_credentials(
            [pair], root_certificates=ca, require_client_auth=ca is not None
        )

    def guard(self) -> Guard:
        """The rules for the port's calls.

        Raises:
            SecurityError: A token file that cannot be used, or a limit out of range.
        """
        if not 1 <= self.streams_per_peer <= MOST_STREAMS_PER_PEER:
            raise SecurityError(
                f"--max-streams-per-peer: expected 1 to {MOST_STREAMS_PER_PEER}, "
                f"got {self.streams_per_peer}"
            )
        if self.token_file is None:
            return Guard(None, self.streams_per_peer)
        try:
            return Guard(Tokens.read(self.token_file), self.streams_per_peer)
        except ValueError as error:
            raise SecurityError(f"--token-file: {error}") from None

    def weakness(self, address: str) -> str | None:
        """What others can do at the address of a server with these demands; None is nothing new."""
        if not exposed(address) or self.client_ca is not None:
            return None
        if self.certificate is None:
            return "plain text beyond this host"
        return None if self.token_file is not None else "anybody may call"


@dataclass(frozen=True)
class ClientSecurity:
    """What a client trusts and shows; by default it speaks plain text."""

    ca: Path | None = None  # PEM; the server's certificate must be signed by it
    certificate: Path | None = None  # PEM, for a server that demands one
    key: Path | None = None
    token_file: Path | None = None  # its first token is shown

    def credentials(self, prefix: str = "--tls") -> grpc.ChannelCredentials | None:
        """For a channel; None is plain text.

        Args:
            prefix: Of the flags that these came from, for errors.

        Raises:
            SecurityError: Files that are missing, do not fit, or cannot be read.
        """
        certificate, key = f"{prefix}-cert", f"{prefix}-key"
        ca = _authority(f"{prefix}-ca", self.ca)
        if ca is None:
            if self.certificate is not None or self.key is not None:
                raise SecurityError(f"{certificate}: expected {prefix}-ca beside it")
            return None
        if self.certificate is None and self.key is None:
            return grpc.ssl_channel_credentials(ca)
        own_key, own = _key_pair(certificate, self.certificate, key, self.key)
        return grpc.ssl_channel_credentials(ca, own_key, own)

    def token(self) -> str | None:
        """The token to show, if any.

        Raises:
            SecurityError: A token file that cannot be used.
        """
        if self.token_file is None:
            return None
        try:
            return read_tokens(self.token_file)[0]
        except ValueError as error:
            raise SecurityError(str(error)) from None


def exposed(address: str) -> bool:
    """Whether an address to listen on can be reached from other hosts."""
    if address.startswith("unix:"):
        return False
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return False
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return True  # a name, or a wildcard


# --- flags


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """What a port demands; verbs of a client take the TLS flags and the token file too."""
    group = parser.add_argument_group("security of the port")
    _add_files(group, "--tls", "this end's certificate chain", "whom this end trusts")
    group.add_argument(
        "--token-file",
        metavar="FILE",
        default=None,
        help="bearer tokens that are accepted, one a line (default: every caller)",
    )
    group.add_argument(
        "--max-streams-per-peer",
        type=int,
        metavar="N",
        default=STREAMS_PER_PEER,
        help="calls that one host may have at once (default: %(default)s)",
    )


def add_client_arguments(parser: argparse.ArgumentParser) -> None:
    """What a client trusts and shows: the same flags, less the server's limit."""
    group = parser.add_argument_group("security of the connection")
    _add_files(group, "--tls", "this end's certificate chain", "whom this end trusts")
    group.add_argument(
        "--token-file",
        metavar="FILE",
        default=None,
        help="its first line is shown as the bearer token",
    )


def add_drafter_channel_arguments(parser: argparse.ArgumentParser) -> None:
    """How a verifier dials a drafter that is secured."""
    group = parser.add_argument_group("the connection to the drafter")
    _add_files(
        group, "--drafter-tls", "certificate chain shown to the drafter", "who signed the drafter's"
    )
    group.add_argument(
        "--drafter-token-file",
        metavar="FILE",
        default=None,
        help="its first line is the token shown to the drafter",
    )


def _add_files(group: Any, prefix: str, certificate: str, ca: str) -> None:
    for suffix, meaning in (
        ("cert", f"{certificate}, PEM"),
        ("key", "its private key, PEM"),
        ("ca", f"{ca}: a PEM of certificate authorities"),
    ):
        group.add_argument(f"{prefix}-{suffix}", metavar="FILE", default=None, help=meaning)


def client_security(flags: argparse.Namespace) -> ClientSecurity:
    """From the flags of `add_client_arguments` or `add_server_arguments`."""
    return ClientSecurity(
        _path(flags.tls_ca), _path(flags.tls_cert), _path(flags.tls_key), _path(flags.token_file)
    )


def drafter_channel_security(flags: argparse.Namespace) -> ClientSecurity:
    """From the flags of `add_drafter_channel_arguments`."""
    return ClientSecurity(
        _path(flags.drafter_tls_ca),
        _path(flags.drafter_tls_cert),
        _path(flags.drafter_tls_key),
        _path(flags.drafter_token_file),
    )


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)


# --- files


def _key_pair(
    certificate_flag: str, certificate: Path | None, key_flag: str, key: Path | None
) -> tuple[bytes, bytes]:
    """Key and certificate, which fit one another."""
    if certificate is None or key is None:
        given, missing = (
            (certificate_flag, key_flag) if key is None else (key_flag, certificate_flag)
        )
        raise SecurityError(f"{given}: expected {missing} beside it")
    pair = _read(key_flag, key), _read(certificate_flag, certificate)
    try:
        # a password of no length: OpenSSL would ask for one on the terminal
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except (ssl.SSLError, ValueError) as error:
        raise SecurityError(
            f"{certificate_flag}: expected a PEM certificate and its key, got {certificate} and "
            f"{key} ({_cause(error)})"
        ) from None
    return pair


def _authority(flag: str, path: Path | None) -> bytes | None:
    if path is None:
        return None
    pem = _read(flag, path)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except ssl.SSLError as error:
        raise SecurityError(
            f"{flag}: expected PEM certificates, got {path} ({_cause(error)})"
        ) from None
    return pem


def _read(flag: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        cause = error.strerror
        raise SecurityError(f"{flag}: expected a readable file, got {path} ({cause})") from None


def _cause(error: Exception) -> str:
    reason = getattr(error, "reason", None)
    return str(reason or error).lower().replace("_", " ")
