"""What `outrider check` measures against: the float32 target, the drafter's own q, and what
completions must look like if both are right.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self

from outrider.cli import VerbError
from outrider.cli.statistics import ChiSquare, Independence, Law, Rate
from outrider.client import Completion, RoundTrace
from outrider.tensors import row_bytes

if TYPE_CHECKING:
    import torch

    from verifier.__main__ import Plan
    from verifier.proposals import Drafted
    from verifier.target import Forward

# a check fails when chance alone would fail it less often than this
SIGNIFICANCE = 1e-4
# samples with the same beginning are compared when there are this many
LEAST_GROUP = 40
# tokens of a sample that are compared
COMPARED_TOKENS = 3
# share of samples that bfloat16 may move across the edge of a filter
BFLOAT16_STRAYS = 0.02
# how far a log-probability may lie from the float32 target's, by numeric profile
LOGPROB_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.25}
CALL_TIMEOUT_S = 600.0
CONNECT_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Outcome:
    """One line of the table; passed is None where there was too little to compare."""

    check: str
    setting: str
    expected: str
    observed: str
    passed: bool | None


def first_live(plan: Plan) -> int:
    """P of a sample's first round: two, so that every kind of draw occurs early.

    A DFlash draft sees as many columns as it proposes, and is at home at K alone; trees grow around
    a whole chain.
    """
    whole = plan.draft.format == "dflash" or not plan.tree_nodes.off
    return plan.draft_tokens if whole else min(2, plan.draft_tokens)


def output_tokens(plan: Plan) -> int:
    """Tokens of a sample: the prompt's own, P, and one that the target adds."""
    return max(first_live(plan) + 2, COMPARED_TOKENS)


class Reference:
    """The target in FP32 on the CPU, through prefill alone.

    Args:
        plan: The pair that is served.
    """

    def __init__(self, plan: Plan) -> None:
        import torch

        from outrider.random_weights import open_checkpoint
        from verifier.projection import Projection
        from verifier.state import TargetState
        from verifier.target import Target
        from verifier.weights import load_weights

        weights = load_weights(plan.target, plan.config, dtype=torch.float32)
        self._state = TargetState(
            plan.config, lanes=1, max_context=plan.max_context, width=1, dtype=torch.float32
        )
        self._target = Target(plan.config, weights, self._state, plan.draft.target_layer_ids)
        with open_checkpoint(plan.options.draft, plan.options.load_format) as checkpoint:
            self._projection = Projection.load(
                checkpoint, plan.draft, dtype=torch.float32, device=torch.device("cpu")
            )
        self._public_vocab = plan.config.public_vocab
        self._known: dict[tuple[int, ...], torch.Tensor] = {}
        self.dtype = plan.options.dtype  # numeric profile of the services

    @property
    def exact(self) -> bool:
        """Whether the services compute in this target's own profile."""
        return self.dtype == "float32"

    def logits(self, ids: tuple[int, ...]) -> torch.Tensor:
        """Raw logits [public_vocab] of the token after ``ids``."""
        if ids not in self._known:
            self._known[ids] = self.walk(ids, ())[0]
        return self._known[ids]

    def walk(self, prompt: Sequence[int], output: Sequence[int]) -> list[torch.Tensor]:
        """Logits after the prompt, and after each token of ``output``."""
        pieces = [tuple(prompt), *((token,) for token in output)]
        return [
            forward.logits[0, -1, : self._public_vocab].float()
            for forward in self._prefilled(pieces)
            if forward.logits is not None
        ]

    def features(self, prompt: tuple[int, ...]) -> torch.Tensor:
        """Projected features, [n, H]."""
        (forward,) = self._prefilled([prompt])
        return self._projection(forward.features[0])

    def entropy(self, prompt: tuple[int, ...]) -> float:
        """Of the next token at temperature 1, nats."""
        p = Law().probabilities(self.logits(prompt), prompt, ())
        return float(-(p * p.clamp_min(1e-300).log()).sum())

    def tie(self, best: float) -> float:
        """How far below the best logit a token may lie and still be tied with it."""
        if self.exact:
            return 1e-3
        # two units in the last place of a BF16 number of this size
        return 2.0 * 2.0 ** (math.floor(math.log2(max(abs(best), 2.0**-20))) - 7)

    def _prefilled(self, pieces: Sequence[tuple[int, ...]]) -> Iterator[Forward]:
        import torch

        residency = self._state.acquire(sum(map(len, pieces)))
        assert residency is not None
        first = 0
        for piece in pieces:
            yield self._target.prefill(residency, torch.tensor(piece), first, want_logits=True)
            first += len(piece)
        self._state.release(residency)


class Proposer:
    """A stream of our own to the drafter, to ask for its law after any first token.

    Args:
        address: The drafter.
        plan: The pair that is served.
        features: Of the prompt, projected, [n, H].
    """

    def __init__(self, address: str, plan: Plan, features: torch.Tensor) -> None:
        from verifier.drafter_link import DrafterLink

        self._link = DrafterLink(
            address,
            plan.hello(),
            row_bytes=plan.row_bytes,
            window=plan.draft.window,
            all_local=plan.draft.full_layer_count == 0,
            timeout_ns=int(CALL_TIMEOUT_S * 1e9),
            backlog_rows=max(plan.max_context, plan.width),
            on_event=lambda: None,
        )
        self._features = features.to(plan.dtype)
        self.live = first_live(plan)

    def __enter__(self) -> Self:
        self._link.start()
        end = time.monotonic() + CONNECT_TIMEOUT_S
        while not self._link.connected:
            if time.monotonic() > end:
                self._link.stop()
                raise VerbError(f"no second stream to the drafter: {self._link.detail}")
            time.sleep(0.02)
            self._link.poll()
        self._context = self._link.context()
        self._link.ensure_open(self._context, 0, len(self._features))
        self._link.extend(self._context, 0, row_bytes(self._features))
        while self._link.has_backlog(self._context):
            self._link.pump(drafting=False)
            time.sleep(0.001)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._link.stop()

    def q(self, anchor: int, temperature: float, size: int) -> torch.Tensor:
        """The law of the first proposal after the prompt and ``anchor``, FP64 [size]."""
        import torch

        drafted = self._propose(anchor, temperature)
        (law,) = self._link.laws([drafted])
        if law is None:
            raise VerbError("the drafter's q is none; its log and the counters say why")
        q = torch.zeros(size, dtype=torch.float64)
        if law.candidate_ids is None or law.probabilities is None:
            q[drafted.token_ids[0]] = 1.0
            return q
        return q.scatter_add(0, law.candidate_ids[0].long(), law.probabilities[0].double())

    def _propose(self, anchor: int, temperature: float) -> Drafted:
        from verifier.proposals import Ask

        ask = Ask(
            self._context,
            live=self.live,
            frontier=len(self._features),
            anchor=anchor,
            temperature=temperature,
            seed=0,
        )
        drafted = self._link.exchange([ask]).proposals.get(self._context.sequence_id)
        if drafted is None:
            raise VerbError(f"the drafter gave no proposal: {dict(self._link.counters)}")
        return drafted


# --- greedy


def drafting(setting: str, completions: Sequence[Completion]) -> Outcome:
    """Whether proposals came at all; without them every other check is idle."""
    proposed = sum(each.usage.proposed for each in completions)
    rounds = sum(each.usage.rounds for each in completions)
    tokens = sum(len(each.token_ids) for each in completions)
    shown = f"{proposed} proposed, {tokens / max(1, rounds):.2f} tokens a round"
    return Outcome("drafting takes place", setting, "proposals", shown, proposed > 0)


def same(
    check: str, setting: str, these: Sequence[Completion], those: Sequence[Completion]
) -> Outcome:
    """Whether two runs published the same tokens."""
    differences = [
        f"prompt {index} from token {_first_difference(a.token_ids, b.token_ids)}"
        for index, (a, b) in enumerate(zip(these, those, strict=True))
        if a.token_ids != b.token_ids
    ]
    shown = ", ".join(differences) or "the same"
    return Outcome(check, setting, "the same", shown, not differences)


def _first_difference(these: Sequence[int], those: Sequence[int]) -> int:
    pairs = zip(these, those, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(these), len(those)))


def best(
    which: str,
    reference: Reference,
    prompts: Sequence[tuple[int, ...]],
    completions: Sequence[Completion],
) -> list[Outcome]:
    """Whether each token is the float32 target's best, with its log-probability.

    The log-probabilities show a wrong state long before a token changes.
    """
    worse: list[str] = []
    farthest, total = 0.0, 0
    for index, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        walked = reference.walk(prompt, completion.token_ids[:-1])
        rows = zip(completion.token_ids, completion.logprobs, walked, strict=True)
        for position, (token, reported, logits) in enumerate(rows):
            top = float(logits.max())
            total += 1
            if top - float(logits[token]) > reference.tie(top):
                worse.append(f"prompt {index} token {position}")
            logprob = float(logits.double().log_softmax(0)[token])
            # written so that NaN is far
            distance = abs(reported.logprob - logprob)
            farthest = distance if not distance <= farthest else farthest
    tolerance = LOGPROB_TOLERANCE[reference.dtype]
    shown = f"{len(worse)} not, first {worse[0]}" if worse else "each the best"
    return [
        Outcome(f"greedy, {which}", f"{total} tokens", "each the best", shown, not worse),
        Outcome(
            f"log-probabilities, {which}",
            f"{total} tokens",
            f"within {tolerance:g}",
            f"within {farthest:.2g}",
            farthest <= tolerance,
        ),
    ]


# --- sampled


@dataclass(frozen=True)
class Samples:
    """The samples of one law, and what they must look like."""

    name: str
    law: Law
    completions: Sequence[Completion]
    prompt: tuple[int, ...]

    def outcomes(self, reference: Reference, proposer: Proposer) -> list[Outcome]:
        """Lines for the first three tokens, and for the draws of the first round."""
        tokens = [
            self._fit(f"{ordinal} token", self._tokens(reference, length), reference)
            for length, ordinal in zip(
                range(COMPARED_TOKENS), ("first", "second", "third"), strict=True
            )
        ]
        return [*tokens, *self._first_round(reference, proposer), self._independent(proposer)]

    def _p(self, reference: Reference, output: tuple[int, ...]) -> torch.Tensor:
        logits = reference.logits(self.prompt + output)
        return self.law.probabilities(logits, self.prompt, output)

    def _groups(self, length: int) -> dict[tuple[int, ...], list[Completion]]:
        """Completions by their first ``length`` tokens, where there are enough."""
        groups: dict[tuple[int, ...], list[Completion]] = defaultdict(list)
        for each in self.completions:
            groups[each.token_ids[:length]].append(each)
        return {
            output: members
            for output, members in groups.items()
            if length == 0 or len(members) >= LEAST_GROUP
        }

    def _drafted(self, proposer: Proposer) -> dict[int, list[tuple[RoundTrace, int]]]:
        """First rounds that proposed in full, with the second token, by the first token."""
        return {
            output[0]: [
                (each.rounds[0], each.token_ids[1])
                for each in members
                if each.rounds and len(each.rounds[0].proposed) >= proposer.live
            ]
            for output, members in self._groups(1).items()
        }

    def _tokens(self, reference: Reference, length: int) -> ChiSquare:
        """The token after each beginning of ``length`` tokens, against p."""
        fit = ChiSquare()
        for output, members in self._groups(length).items():
            observed = Counter(each.token_ids[length] for each in members)
            fit.add(*self._decided(reference, output, observed))
        return fit

    def _decided(
        self, reference: Reference, output: tuple[int, ...], observed: Counter[int]
    ) -> tuple[Counter[int], torch.Tensor]:
        """What occurred and p, without the tokens that rounding may bring in or leave out."""
        p = self._p(reference, output)
        if reference.exact:
            return observed, p
        logits = reference.logits(self.prompt + output)
        tie = reference.tie(float(logits.max()))
        undecided = self.law.undecided(logits, self.prompt, output, tie)
        rest = p.masked_fill(undecided, 0.0)
        seen = Counter({token: n for token, n in observed.items() if not undecided[token]})
        return seen, rest / rest.sum()

    def _first_round(self, reference: Reference, proposer: Proposer) -> list[Outcome]:
        """d_1 against q, its accept rate against sum(min(p, q)), corrections against the rest."""
        proposals, corrections, accepts = ChiSquare(), ChiSquare(), Rate()
        for first, rounds in self._drafted(proposer).items():
            if not rounds:
                continue
            p = self._p(reference, (first,))
            q = proposer.q(first, self.law.temperature, len(p))
            proposals.add(Counter(trace.proposed[0] for trace, _ in rounds), q)
            overlap = min(1.0, float(p.minimum(q).sum()))
            passed = sum(_passed(trace) for trace, _ in rounds)
            accepts.add(passed, len(rounds), overlap)
            rest = (p - q).clamp_min(0.0)
            # in a tree it is drawn from what the siblings left too
            corrected = Counter(
                second for trace, second in rounds if trace.accepted == 0 and not trace.parents
            )
            if corrected and float(rest.sum()) > 0.0:
                corrections.add(corrected, rest / rest.sum())
        return [
            self._fit("proposal", proposals, reference),
            self._rate(accepts),
            self._fit("correction", corrections, reference),
        ]

    def _independent(self, proposer: Proposer) -> Outcome:
        """Draws of one round that must know nothing of each other.

        Given the first token, a correction does not depend on what a chain proposed; given d_1 too,
        whether it passed does not depend on d_2.
        """
        fit = Independence()
        for drafted in self._drafted(proposer).values():
            rounds = [each for each in drafted if not each[0].parents]
            rejected = [(trace, second) for trace, second in rounds if trace.accepted == 0]
            for place in range(proposer.live):
                fit.add([(trace.proposed[place], second) for trace, second in rejected])
            by_proposal: dict[int, list[tuple[int, int]]] = defaultdict(list)
            for trace, _ in rounds if proposer.live > 1 else ():
                by_proposal[trace.proposed[0]].append((int(trace.accepted > 0), trace.proposed[1]))
            for pairs in by_proposal.values():
                fit.add(pairs)
        return self._verdict("independent draws", fit, fit.p_value, None)

    def _fit(self, check: str, fit: ChiSquare, reference: Reference) -> Outcome:
        if fit.observations == 0:
            return Outcome(check, self.name, _WANTED, "too few samples begin alike", None)
        strays = 0 if reference.exact else int(BFLOAT16_STRAYS * fit.observations)
        impossible = fit.impossible if fit.impossible > strays else 0
        if fit.freedom == 0 and not impossible and not reference.exact:
            return Outcome(check, self.name, _WANTED, "too little is decided in bfloat16", None)
        return self._verdict(check, fit, fit.p_value, impossible)

    def _verdict(
        self, check: str, fit: ChiSquare | Independence, p_value: float, impossible: int | None
    ) -> Outcome:
        shown = f"p {p_value:.2g}, chi-square {fit.statistic:.1f}/{fit.freedom}"
        if impossible:
            shown = f"{impossible} impossible, {shown}"
        passed: bool | None = p_value >= SIGNIFICANCE and not impossible
        if fit.freedom == 0 and impossible is None:
            passed, shown = None, "too little varies"
        return Outcome(check, self.name, _WANTED, shown, passed)

    def _rate(self, rate: Rate) -> Outcome:
        if rate.count == 0:
            return Outcome("accept rate", self.name, _WANTED, "too few samples begin alike", None)
        return Outcome(
            "accept rate",
            self.name,
            f"{rate.expected / rate.count:.3f}, {_WANTED}",
            f"{rate.happened / rate.count:.3f} of {rate.count}, p {rate.p_value:.2g}",
            rate.p_value >= SIGNIFICANCE,
        )


def _passed(trace: RoundTrace) -> bool:
    """Whether d_1 was accepted: in a tree, not one of its siblings."""
    return trace.columns[:1] == (1,) if trace.parents else trace.accepted > 0


_WANTED = f"p >= {SIGNIFICANCE:g}"
