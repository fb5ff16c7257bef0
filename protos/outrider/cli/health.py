"""`outrider health`: asks a server's standard health service; for probes and scripts."""

from __future__ import annotations

import argparse

import grpc
from google.protobuf import wrappers_pb2

from outrider import security, serving
from outrider.cli import FAILED, VerbError
from outrider.cli.generate import shown
from outrider.faults import from_rpc_error

STATUSES = ("UNKNOWN", "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which server, and which of its services."""
    parser.add_argument(
        "--address",
        default=serving.VERIFIER_LISTEN,
        help="a running verifier or drafter (default: %(default)s)",
    )
    parser.add_argument(
        "--service",
        metavar="NAME",
        default="",
        help="full name of a service, for its readiness (default: liveness of the process)",
    )
    parser.add_argument(
        "--timeout", type=float, metavar="SECONDS", default=5.0, help="(default: %(default)s)"
    )
    security.add_client_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Prints the status; 0 only for SERVING."""
    with _channel(options) as channel:
        # on the wire the two messages of a check are a string and a number, each as field 1, and
        # the base install has no stubs of grpc.health.v1
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=wrappers_pb2.StringValue.SerializeToString,
            response_deserializer=wrappers_pb2.Int32Value.FromString,
        )
        try:
            answer = check(wrappers_pb2.StringValue(value=options.service), timeout=options.timeout)
        except grpc.RpcError as error:
            raise VerbError(f"{options.address}: {from_rpc_error(error)}") from None
    known = 0 <= answer.value < len(STATUSES)
    status = STATUSES[answer.value] if known else STATUSES[0]
    print(status)
    return 0 if status == "SERVING" else FAILED


def _channel(options: argparse.Namespace) -> grpc.Channel:
    # health asks for no token
    address, (credentials, _) = serving.dialable(options.address), shown(options)
    if credentials is None:
        return grpc.insecure_channel(address, options=serving.CHANNEL_OPTIONS)
    return grpc.secure_channel(address, credentials, options=serving.CHANNEL_OPTIONS)
