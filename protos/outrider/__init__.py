"""Outrider's wire and SDK: stubs, codec, faults, checkpoint reading, server plumbing, CLI."""

__version__ = "0.1.0"
# revision of outrider.v1's DraftRounds; Hello carries it and both ends must agree
PROTOCOL_REVISION = 2
