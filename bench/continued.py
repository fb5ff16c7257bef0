"""Whether a sequence that was kept, copied, moved or left by its drafter goes on as if it were not.

``python -m bench.continued --device cuda`` serves the bundled pair three times and compares tokens
with those of runs that began cold and were alone: samples that share one prefill, and samples that
were paused for want of pages and replayed; prefixes that came back from host memory, and samples
that were paused with a snapshot; prefixes on the device, neighbours that continue one prefix, and a
request whose drafter is killed on its way.

In BF16 a prompt's columns depend on where it is cut into chunks. Equal tokens are demanded where a
prefix is the whole prompt or ends at a multiple of the chunk, because a cold run is cut there too;
of other prefixes it is told how many outputs were equal. In float32 all are demanded. It prints one
line a comparison and exits 1 when one that is demanded differs, or when what was to happen, a hit,
a fork, a pause or a loss, did not.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from bench.invariance import Verdict, held_out
from bench.pair import Services, describe, flag_line, services
from outrider.client import Client, Completion

Sampling = Mapping[str, float]
GREEDY: Sampling = {"temperature": 0.0}
SEEDED: Sampling = {"temperature": 0.9, "top_p": 0.95, "seed": 11}
PENALISED: Sampling = {**SEEDED, "frequency_penalty": 0.4, "presence_penalty": 0.2}
WAYS = {"greedy": GREEDY, "seeded": SEEDED}

# what a prompt is cut into; on CUDA enough columns for the products that a BLAS does
CHUNKS = {"cpu": 64, "cuda": 512}
PAGE = 64
OUTPUT = 48  # tokens of an answer after a hit
MORE = 70  # tokens of a prompt behind the prefix that it continues
# more than the engine may be ahead of a reader, so that the drafter is lost in the middle of it
KILLED_OUTPUT = 3500
ACCEPTED_BEFORE_KILL = 20


@dataclass(frozen=True)
class Case:
    """A prompt that continues another one's checkpoint."""

    kind: str
    prefix: tuple[int, ...]  # the prompt that leaves the checkpoint
    prompt: tuple[int, ...]
    cached: int  # tokens that the checkpoint holds
    exact: bool  # whether its output has to be a cold run's


class Check:
    """All comparisons, in order. Runs that began cold and were alone are done once."""

    def __init__(self, device: str, verdict: Verdict, chunk: int | None = None) -> None:
        kind = device.partition(":")[0]
        self._chunk = chunk = chunk or CHUNKS[kind]
        self._verdict = verdict
        self._float32 = kind == "cpu"
        self._common = (
            f"--device={device}",
            "--draft-tokens=7",
            "--max-concurrency=4",
            "--log-level=warning",
        )
        # whole chunks, less, and more
        lengths = (2 * chunk, 3 * chunk // 2, 2 * chunk + 5, chunk, 2 * chunk - 8, 3 * chunk)
        stream = [token for ids in held_out(112) for token in ids]
        size = len(stream) // len(lengths)
        # none of the texts begins like another
        texts = [stream[size * i : size * (i + 1)] for i in range(len(lengths))]
        self._prompts = [text[:count] for text, count in zip(texts, lengths, strict=True)]
        self._behind = [text[-MORE:] for text in texts]
        self._forked = [text[-100:] for text in texts[:2]]
        self._killed = texts[0][-200:-100]
        # pages for the longest prompt; four samples of the others need twice as many
        self._pages = max(8, -(-(max(lengths) + MORE + 2 * OUTPUT) // PAGE))
        self._pressed = [text[-300 : -210 + 7 * i] for i, text in enumerate(texts[:4])]
        self._pressed_output = self._pages * PAGE // 2 - 136
        self._cold: dict[tuple[tuple[int, ...], str], tuple[int, ...]] = {}
        self._cold_pressed: list[tuple[int, ...]] = []
        self._cases: list[Case] = []

    def run(self) -> None:
        """Serves three times and compares."""
        tight = (f"--kv-pages={self._pages}",)
        short, long = f"--max-context={self._pages * PAGE}", "--max-context=4096"
        host = ("--checkpoint-slots=2", "--checkpoint-host-mib=64")
        self._serve("cold runs, forks, replays", self._without_memory, (short,), tight)
        self._serve("host memory", self._in_host_memory, (short, *host), tight)
        self._serve(
            "prefixes, lost drafter", self._on_device, (long, "--checkpoint-slots=64"), drafters=2
        )

    def _serve(
        self,
        name: str,
        part: Callable[[Client, Services], None],
        flags: Sequence[str],
        verifier: Sequence[str] = (),
        drafters: int = 1,
    ) -> None:
        started = time.monotonic()
        with (
            services(
                (*self._common, *flags),
                (f"--prefill-chunk={self._chunk}", *verifier),
                drafters=drafters,
            ) as running,
            Client(running.address) as client,
        ):
            ready_s = time.monotonic() - started
            part(client, running)
            total_s = time.monotonic() - started
        print(f"{name}: {total_s:.0f} s, the start {ready_s:.0f} of them", flush=True)

    # ---- nothing is kept: cold runs, forks, replays ---------------------------------------------

    def _without_memory(self, client: Client, _: Services) -> None:
        for prompt in self._prompts:
            self._run_cold(client, prompt)
        self._cases = list(self._plan())
        for case in self._cases:
            self._run_cold(client, case.prompt)
        for name, sampling, count in (("greedy", GREEDY, 2), ("seeded", SEEDED, 3)):
            forks = _counter(client, "forks")
            samples, alone = [], []
            for prompt in self._forked:
                some = client.samples(**_request(prompt, OUTPUT, sampling), n=count)
                samples += some
                for each in some:
                    own = {**sampling, "seed": each.usage.seed} if "seed" in sampling else sampling
                    alone.append(_ask(client, prompt, OUTPUT, own))
            self._compare(f"{count} {name} samples of one prefill", samples, _tokens(alone))
            made = _counter(client, "forks") - forks
            self._expect(made == (count - 1) * len(self._forked), f"{made} forks")
        pauses = _counter(client, "pauses")
        self._cold_pressed = _tokens(
            [self._ask_pressed(client, index) for index in range(len(self._pressed))]
        )
        self._expect(_counter(client, "pauses") == pauses, "nobody paused alone")
        self._press(client, "paused and replayed")

    def _run_cold(self, client: Client, prompt: Sequence[int]) -> None:
        for way, sampling in WAYS.items():
            completion = _ask(client, prompt, OUTPUT, sampling)
            assert completion.usage.cached_tokens == 0
            self._cold[tuple(prompt), way] = completion.token_ids

    def _plan(self) -> list[Case]:
        """Continuations of every prompt, and of its answer."""
        cases = []
        for prompt, behind in zip(self._prompts, self._behind[1:] + self._behind[:1], strict=True):
            prefix = tuple(prompt)
            whole = len(prompt) % self._chunk == 0
            kind = "ends at a chunk's end" if whole else "ends within a chunk"
            exact = whole or self._float32
            cases.append(Case(kind, prefix, (*prefix, *behind), len(prefix), exact))
            answer = self._cold[prefix, "greedy"]
            # the last token of an answer has not been processed
            cached = len(prefix) + len(answer) - 1
            turn = (*prefix, *answer, *behind)
            cases.append(Case("is a prompt and its answer", prefix, turn, cached, self._float32))
        return cases

    # ---- too few pages ---------------------------------------------------------------------------

    def _ask_pressed(self, client: Client, index: int) -> Completion:
        sampling = PENALISED if index % 2 else GREEDY
        return _ask(client, self._pressed[index], self._pressed_output, sampling)

    def _press(self, client: Client, name: str) -> None:
        pauses = _counter(client, "pauses")
        with ThreadPoolExecutor(len(self._pressed)) as pool:
            together = list(
                pool.map(lambda i: self._ask_pressed(client, i), range(len(self._pressed)))
            )
        self._compare(name, together, self._cold_pressed)
        made = _counter(client, "pauses") - pauses
        self._expect(made > 0, f"{made} pauses")

    def _in_host_memory(self, client: Client, _: Services) -> None:
        self._press(client, "paused with a snapshot")
        self._ask_each(client, self._prompts, GREEDY)
        for way, sampling in WAYS.items():
            hits = _counter(client, "checkpoint_host_hits")
            again = self._ask_each(client, self._prompts, sampling)
            wanted = [self._cold[tuple(prompt), way] for prompt in self._prompts]
            self._compare(f"prefixes in host memory, {way}", again, wanted)
            made = _counter(client, "checkpoint_host_hits") - hits
            self._expect(made > len(again) // 2, f"{made} hits in host memory")

    # ---- prefixes on the device, and a drafter that is killed ------------------------------------

    def _on_device(self, client: Client, running: Services) -> None:
        first = self._ask_each(client, self._prompts, GREEDY)
        wanted = [self._cold[tuple(prompt), "greedy"] for prompt in self._prompts]
        self._compare("prompts that find nothing kept", first, wanted)
        for way, sampling in WAYS.items():
            again = self._ask_each(client, self._prompts, sampling)
            wanted = [self._cold[tuple(prompt), way] for prompt in self._prompts]
            self._compare(f"the whole prompt was kept, {way}", again, wanted)
            self._expect_cached(again, [len(prompt) for prompt in self._prompts])
        for kind in dict.fromkeys(case.kind for case in self._cases):
            cases = [case for case in self._cases if case.kind == kind]
            for way, sampling in WAYS.items():
                found = self._ask_each(client, [case.prompt for case in cases], sampling)
                wanted = [self._cold[case.prompt, way] for case in cases]
                name = f"the prefix {kind}, {way}"
                self._compare(name, found, wanted, demanded=all(case.exact for case in cases))
                if way == "greedy":
                    # from now on the whole of these prompts is kept
                    self._expect_cached(found, [case.cached for case in cases])
        self._lose_drafter(client, running)

    def _lose_drafter(self, client: Client, running: Services) -> None:
        tokens = KILLED_OUTPUT
        plain = _ask(client, self._killed, tokens, GREEDY, draft_tokens=0)
        losses = _counter(client, "drafter_losses")
        token_ids: list[int] = []
        before = after = 0
        request = _request(self._killed, tokens, GREEDY)
        with client.stream(**request, return_rounds=True) as stream:
            for delta in stream:
                token_ids += delta.token_ids
                accepted = sum(each.accepted for each in delta.rounds)
                if before < ACCEPTED_BEFORE_KILL:
                    before += accepted
                    if before >= ACCEPTED_BEFORE_KILL:
                        running.drafters[0].kill()
                elif _counter(client, "drafter_losses") > losses:
                    after += accepted
        self._verdict.compare(
            "the drafter was killed, another one took over", [tuple(token_ids)], [plain.token_ids]
        )
        made = _counter(client, "drafter_losses") - losses
        seeded = _counter(client, "drafter_reseeds")
        self._expect(
            made == 1 and seeded > 0 and after > 0,
            f"{made} losses, {seeded} contexts seeded anew, {after} accepted afterwards",
        )

    def _ask_each(
        self, client: Client, prompts: Sequence[Sequence[int]], sampling: Sampling
    ) -> list[Completion]:
        """One after the other, each when the one before has left its checkpoints."""
        completions = []
        for prompt in prompts:
            completions.append(_ask(client, prompt, OUTPUT, sampling))
            _settle(client)
        return completions

    # ---- verdicts --------------------------------------------------------------------------------

    def _compare(
        self,
        name: str,
        actual: Sequence[Completion],
        wanted: Sequence[tuple[int, ...]],
        *,
        demanded: bool = True,
    ) -> None:
        if demanded:
            self._verdict.compare(name, _tokens(actual), wanted)
            return
        equal = sum(a.token_ids == w for a, w in zip(actual, wanted, strict=True))
        print(f"told    {name}: {equal} of {len(wanted)} outputs equal", flush=True)

    def _expect_cached(self, found: Sequence[Completion], wanted: Sequence[int]) -> None:
        cached = [completion.usage.cached_tokens for completion in found]
        self._expect(cached == list(wanted), f"cached {cached}, expected {list(wanted)}")

    def _expect(self, happened: bool, what: str) -> None:
        self._verdict.failed += not happened
        print(f"{'so     ' if happened else 'not so '} {what}", flush=True)


def _request(prompt: Sequence[int], tokens: int, sampling: Sampling) -> dict[str, object]:
    return {"prompt_ids": list(prompt), "max_tokens": tokens, "ignore_eos": True, **sampling}


def _ask(
    client: Client, prompt: Sequence[int], tokens: int, sampling: Sampling, **more: int
) -> Completion:
    return client.generate(**_request(prompt, tokens, sampling), **more)


def _tokens(completions: Sequence[Completion]) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in completions]


def _counter(client: Client, name: str) -> int:
    return client.server_info().counters.get(name, 0)


def _settle(client: Client) -> None:
    """Waits until nothing runs and the drafter has confirmed what it was told to keep."""
    while True:
        info = client.server_info()
        if not info.resident_requests and not info.queued_requests:
            break
        time.sleep(0.01)
    time.sleep(0.05)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the comparisons."""
    parser = argparse.ArgumentParser(prog="python -m bench.continued", description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--chunk", type=int, default=None, help="default: 512 on CUDA, 64 else")
    arguments = parser.parse_args(argv)
    print(f"{flag_line(['bench.continued', *(argv or sys.argv[1:])])}  [{describe()}]")
    verdict = Verdict()
    Check(arguments.device, verdict, arguments.chunk).run()
    print(f"{verdict.failed} comparisons differ")
    sys.exit(1 if verdict.failed else 0)


if __name__ == "__main__":
    main()
