"""What clients are yet to hear of: what rounds kept, accounted for and turned into deltas.

A round's next block waits for nothing of this. So it is put here, and done where the engine waits
for the drafter or the device; making texts and waking the server's loop take time, and the
interpreter's lock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import structlog

from outrider.faults import FaultError
from verifier.acceptance import LicensedRow
from verifier.metrics import VerifierMetrics
from verifier.preview import Preview
from verifier.proposals import Drafted
from verifier.request import Finish, FinishReason, RoundTrace, TokenOrigin
from verifier.sequence import Sequence
from verifier.trees import main_chain

log = structlog.get_logger("outrider.rounds")


@dataclass(frozen=True)
class Kept:
    """What was adopted of one row."""

    preview: Preview
    first: int  # F as it was
    licensed: LicensedRow
    drafted: Drafted | None
    is_round: bool  # not a prompt's first token

    @property
    def accepted(self) -> int:
        """Proposals among what was adopted."""
        return min(self.licensed.accepted, self.preview.count)


class Outbox:
    """Everything to tell, in order.

    Args:
        metrics: Counts what rounds brought.
        draft_tokens: K.
    """

    def __init__(self, metrics: VerifierMetrics, draft_tokens: int) -> None:
        self._metrics = metrics
        self._draft_tokens = draft_tokens
        self._untold: list[Callable[[], None]] = []

    def __len__(self) -> int:
        return len(self._untold)

    def kept(self, row: Sequence, kept: Kept, finish: Finish | None) -> None:
        """What a row's client may see of what was kept, and maybe that this is all."""
        self._untold.append(partial(self._tell, row, kept, finish))

    def ended(self, row: Sequence, outcome: FinishReason | FaultError) -> None:
        """A row ended before its time."""
        self._untold.append(partial(row.end, outcome))

    def round_ended(self, rows: int, *spent_ns: int) -> None:
        """A round's times, for `VerifierMetrics.round_ended`."""
        self._untold.append(partial(self._metrics.round_ended, rows, *spent_ns))

    def deliver(self) -> None:
        """Tells all of it; a row must not be previewed again before."""
        untold, self._untold = self._untold, []
        for tell in untold:
            tell()

    def _tell(self, row: Sequence, kept: Kept, finish: Finish | None) -> None:
        """Accounts for what was kept and turns it into what the row's client may see."""
        count = kept.preview.count
        trace = self._account(row, kept) if kept.is_round else None
        delta = row.session.commit(
            kept.preview,
            origins_of(kept.drafted, kept.licensed)[:count],
            kept.licensed.logprobs[:count],
            trace,
        )
        row.ticket.publish(delta, finish)

    def _account(self, row: Sequence, kept: Kept) -> RoundTrace | None:
        usage, drafted, accepted = row.usage, kept.drafted, kept.accepted
        count, columns = kept.preview.count, kept.licensed.columns[: kept.preview.count]
        proposed = drafted.token_ids if drafted is not None else ()
        usage.rounds += 1
        usage.proposed += len(proposed)
        if drafted is not None and drafted.parents:
            side = len(columns) - main_chain(columns)
            usage.tree_rounds += 1
            usage.tree_columns += len(proposed) + 1
            usage.side_accepted += side
            self._metrics.tree_committed(len(proposed), accepted, count, side, self._draft_tokens)
        else:
            self._metrics.row_committed(len(proposed), accepted, count)
        usage.accepted += accepted
        for position in range(accepted):
            usage.accepted_per_position[position] += 1
        log.debug(
            "round_committed",
            request_id=row.request.request_id,
            sample=row.request.sample_index,
            frontier=kept.first,
            proposed=len(proposed),
            accepted=accepted,
            committed=count,
        )
        if not row.request.return_rounds:
            return None
        parents = drafted.parents if drafted is not None else ()
        return RoundTrace(kept.first, proposed, accepted, count, parents, columns)


def origins_of(drafted: Drafted | None, allowed: LicensedRow) -> tuple[TokenOrigin, ...]:
    """Where each of the L licensed tokens came from."""
    if drafted is None:
        return (TokenOrigin.TARGET,)
    ended = drafted.ends_at(allowed.accepted, allowed.columns)
    terminal = TokenOrigin.BONUS if ended else TokenOrigin.CORRECTION
    return (TokenOrigin.ACCEPTED,) * allowed.accepted + (terminal,)
