"""What `outrider check` compares with: laws restated in a few lines, and tests of fit.

Kept apart from what the services run, on purpose: nothing here imports an op.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# a bin of a chi-square test holds at least this many expected observations
LEAST_EXPECTED = 5.0


@dataclass(frozen=True)
class Law:
    """Sampling parameters of one request, by their names on the wire; neutral by default."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0

    def probabilities(
        self, logits: torch.Tensor, prompt: Sequence[int], output: Sequence[int]
    ) -> torch.Tensor:
        """The processed distribution, FP64, over the ids that logits [V] speak of.

        Repetition (prompt and output), presence and frequency (output), temperature, top_k, min_p,
        top_p of the mass that top_k left; the likeliest token always stays.
        """
        import torch

        z = self._penalised(logits, prompt, output)
        weights, order = ((z - z.max()) / self.temperature).exp().sort(descending=True, stable=True)
        weights[self.top_k or len(weights) :] = 0
        before = weights.cumsum(0) - weights
        stays = (weights >= self.min_p) & (before < self.top_p * weights.sum())
        stays[0] = True
        weights = weights * stays
        return torch.zeros_like(z).scatter(0, order, weights / weights.sum())

    def undecided(
        self, logits: torch.Tensor, prompt: Sequence[int], output: Sequence[int], tie: float
    ) -> torch.Tensor:
        """Ids so near the edge of a filter that logits which are off by ``tie`` decide, bool [V].

        For top_p the odds of the mass before a token may be off by as much as one logit may.
        """
        import torch

        stays = self.probabilities(logits, prompt, output) > 0
        if stays.all():
            return torch.zeros_like(stays)
        z = self._penalised(logits, prompt, output)
        # of a penalised logit the error is as much larger
        tie *= max(self.repetition_penalty, 1 / self.repetition_penalty)
        ranked, order = z.sort(descending=True, stable=True)
        # those that may change ranks over the end of the filters
        near = (ranked >= z[stays].min() - tie) & (ranked <= z[~stays].max() + tie)
        if self.min_p > 0:
            edge = ranked[0] + self.temperature * math.log(self.min_p)
            near |= (ranked - edge).abs() <= tie
        if self.top_p < 1:
            weights = ((ranked - ranked[0]) / self.temperature).exp()
            weights[self.top_k or len(weights) :] = 0
            before = (weights.cumsum(0) - weights) / weights.sum()
            odds = torch.logit(before) - math.log(self.top_p / (1 - self.top_p))
            near |= odds.abs() <= tie / self.temperature
        near[0] = False
        return torch.zeros_like(near).scatter(0, order, near)

    def _penalised(
        self, logits: torch.Tensor, prompt: Sequence[int], output: Sequence[int]
    ) -> torch.Tensor:
        import torch

        z = logits.double().clone()
        seen = sorted({*prompt, *output})
        z[seen] = torch.where(
            z[seen] > 0, z[seen] / self.repetition_penalty, z[seen] * self.repetition_penalty
        )
        for token_id, count in Counter(output).items():
            z[token_id] -= self.presence_penalty + self.frequency_penalty * count
        return z


class ChiSquare:
    """Pearson's test over one or more groups, each with a law of its own."""

    def __init__(self) -> None:
        self.statistic = 0.0
        self.freedom = 0
        self.observations = 0
        self.impossible = 0  # observations that a law gives no probability

    def add(self, observed: Mapping[int, int], probabilities: torch.Tensor) -> None:
        """Adds a group: how often each token occurred, and its law [V]."""
        import torch

        total = sum(observed.values())
        counts = torch.zeros(len(probabilities), dtype=torch.float64)
        for token_id, count in observed.items():
            counts[token_id] = count
        possible = probabilities > 0
        self.observations += total
        self.impossible += int(counts[~possible].sum())
        by_size = probabilities.argsort(descending=True)[: int(possible.sum())]
        expected = (probabilities[by_size] * total).tolist()
        bins = _bins(expected, counts[by_size].tolist())
        if len(bins) > 1:
            self.statistic += sum((seen - due) ** 2 / due for due, seen in bins)
            self.freedom += len(bins) - 1

    @property
    def p_value(self) -> float:
        """Probability of so poor a fit by chance; 1 where nothing could be compared."""
        return _tail(self.statistic, self.freedom)


def _bins(expected: Iterable[float], seen: Iterable[float]) -> list[tuple[float, float]]:
    """(expected, seen) of bins that are large enough; rare tokens share one."""
    bins: list[tuple[float, float]] = []
    due, found = 0.0, 0.0
    for each_due, each_found in zip(expected, seen, strict=True):
        due, found = due + each_due, found + each_found
        if due >= LEAST_EXPECTED:
            bins.append((due, found))
            due, found = 0.0, 0.0
    if due and bins:
        last_due, last_found = bins.pop()
        bins.append((last_due + due, last_found + found))
    elif due:
        bins.append((due, found))
    return bins


class Independence:
    """Pearson's test that pairs of outcomes have nothing to do with each other, over groups."""

    def __init__(self) -> None:
        self.statistic = 0.0
        self.freedom = 0

    def add(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Adds a group of pairs; rare outcomes are taken together until every cell is due five."""
        left, right = (Counter(side) for side in zip(*pairs, strict=True)) if pairs else ({}, {})
        rows, columns = _merged(left, right, len(pairs))
        if len(rows) < 2 or len(columns) < 2:
            return
        cells = Counter((_index(rows, one), _index(columns, other)) for one, other in pairs)
        for i, row in enumerate(rows):
            for j, column in enumerate(columns):
                due = sum(left[k] for k in row) * sum(right[k] for k in column) / len(pairs)
                self.statistic += (cells[i, j] - due) ** 2 / due
        self.freedom += (len(rows) - 1) * (len(columns) - 1)

    @property
    def p_value(self) -> float:
        """Probability of so strong an association by chance; 1 where nothing could be compared."""
        return _tail(self.statistic, self.freedom)


def _merged(
    left: Mapping[int, int], right: Mapping[int, int], total: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Classes of outcomes of either side, such that each cell is due enough observations."""
    rows = [[outcome] for outcome in sorted(left, key=left.__getitem__)]
    columns = [[outcome] for outcome in sorted(right, key=right.__getitem__)]

    def size(members: list[int], counts: Mapping[int, int]) -> int:
        return sum(counts[outcome] for outcome in members)

    while len(rows) > 1 and len(columns) > 1:
        fewest = size(rows[0], left), size(columns[0], right)
        if fewest[0] * fewest[1] >= LEAST_EXPECTED * total:
            break
        # the side with the rarer class gives it up to its next rare one
        classes, counts = (rows, left) if fewest[0] < fewest[1] else (columns, right)
        rare = classes.pop(0)
        classes[0] += rare
        classes.sort(key=partial(size, counts=counts))
    return rows, columns


def _index(classes: Sequence[Sequence[int]], outcome: int) -> int:
    return next(i for i, members in enumerate(classes) if outcome in members)


def _tail(statistic: float, freedom: int) -> float:
    """Upper tail of the chi-square law."""
    import torch

    if freedom == 0:
        return 1.0
    shape = torch.tensor(freedom / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(shape, torch.tensor(statistic / 2, dtype=torch.float64)))


class Rate:
    """How often something happened against how often it should have, over groups."""

    def __init__(self) -> None:
        self.count = 0
        self.happened = 0
        self.expected = 0.0
        self.variance = 0.0

    def add(self, happened: int, count: int, probability: float) -> None:
        """Adds a group of ``count`` trials."""
        self.count += count
        self.happened += happened
        self.expected += count * probability
        self.variance += count * probability * (1.0 - probability)

    @property
    def p_value(self) -> float:
        """Two-sided, by the normal approximation with continuity correction."""
        distance = max(0.0, abs(self.happened - self.expected) - 0.5)
        if distance == 0.0:
            return 1.0
        if self.variance <= 0.0:
            return 0.0
        return math.erfc(distance / math.sqrt(2.0 * self.variance))
