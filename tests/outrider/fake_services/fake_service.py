"""A stand-in for `python -m drafter` and `python -m verifier` under a supervising `outrider`.

FAKE_DRAFTER and FAKE_VERIFIER say what each does, by words: `exit-N` before it is ready, `stubborn`
(ignores SIGTERM), `slow-drain`. FAKE_LOG is a file to which it appends what happens.
"""

import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import fake_generation

from outrider import serving


def main(name):
    orders = os.environ.get(f"FAKE_{name.upper()}", "").split()

    def log(what):
        with Path(os.environ["FAKE_LOG"]).open("a") as file:
            print(name, os.getpid(), what, *sys.argv[1:], file=file)

    log("started")
    listen = next(word for word in sys.argv if word.startswith("--listen=")).partition("=")[2]
    for order in orders:
        if order.startswith("exit-"):
            print(f"error: {name} refuses", file=sys.stderr)
            sys.exit(int(order[5:]))
    ending = serving.Termination()
    server, address = fake_generation.serve(fake_generation.FakeGeneration(), listen)
    with serving.LoadingProgress("weights") as progress:
        progress.update(1, 2)
        progress.update(2, 2)
    if "never-ready" in orders:
        time.sleep(60)
    serving.announce_ready(address)
    ending.wait()
    log("draining")
    if "stubborn" in orders:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(60)
    if "slow-drain" in orders:
        time.sleep(0.5)
    server.stop(None).wait()
    log("ended")
