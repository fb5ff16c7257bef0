"""The command line: verbs against a scripted service, supervision of scripted services."""

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from fake_generation import TEXT, TOKEN_IDS

from outrider import cli
from outrider.cli import demo, serve
from outrider.client import Completion, Usage
from outrider.v1 import generation_service_pb2 as pb

FAKES = Path(__file__).with_name("fake_services")
USAGE_KEYS = {
    "prompt_tokens",
    "cached_tokens",
    "output_tokens",
    "rounds",
    "proposed",
    "accepted",
    "accepted_per_position",
    "tree_rounds",
    "side_accepted",
    "ttft_ms",
    "draft_ms",
    "verify_ms",
    "wire_ms",
}


class Input(io.TextIOWrapper):
    """Standard input that is no terminal."""

    def __init__(self, raw):
        super().__init__(io.BytesIO(raw), encoding="utf-8")


@pytest.fixture
def outrider(monkeypatch, capsys):
    """Runs the command in this process: (exit code, stdout, stderr)."""

    def run(*arguments, stdin=b""):
        monkeypatch.setattr(sys, "stdin", Input(stdin))
        try:
            code = cli.main([str(each) for each in arguments])
        except SystemExit as end:
            code = end.code
        out, err = capsys.readouterr()
        return code, out, err

    return run


# --- verbs and use


def test_every_verb_is_listed_with_what_it_does(outrider):
    code, out, _ = outrider("--help")
    assert code == 0
    for name, entry in cli.VERBS.items():
        assert f"{name:<10}{entry.summary}" in out
    assert set(cli.VERBS) >= {"serve", "generate", "chat", "info", "check", "demo"}


def test_the_version_is_printed(outrider):
    from outrider import __version__

    assert outrider("--version")[:2] == (0, f"outrider {__version__}\n")


@pytest.mark.parametrize("words", [(), ("fly",), ("generate", "--no-such-flag"), ("--flag",)])
def test_wrong_use_ends_with_two_and_says_how(outrider, words):
    code, out, err = outrider(*words)
    assert (code, out) == (2, "")
    assert "usage: outrider" in err


def test_listing_verbs_imports_none_of_them():
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; from outrider.cli import main\n"
            "try: main(['--help'])\n"
            "except SystemExit: print(sorted(m for m in sys.modules if m.startswith('outrider')))",
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert eval(done.stdout.splitlines()[-1]) == ["outrider", "outrider.cli"]


# --- generate


def test_generate_prints_the_text_and_nothing_else(outrider, fake):
    assert outrider("generate", "--address", fake[1], "hello") == (0, TEXT, "")


def test_json_is_one_line_with_exactly_the_promised_keys(outrider, fake):
    code, out, err = outrider("generate", "--address", fake[1], "--json", "--logprobs=2", "hello")
    assert (code, err) == (0, "")
    assert out.count("\n") == 1
    said = json.loads(out)
    assert said.keys() == {"token_ids", "text", "finish_reason", "usage", "rounds", "logprobs"}
    assert said["usage"].keys() == USAGE_KEYS
    assert said["token_ids"] == list(TOKEN_IDS)
    assert said["text"] == TEXT
    assert said["finish_reason"] == "stop"
    assert said["usage"]["accepted_per_position"] == [1, 1, 0]
    assert said["usage"]["ttft_ms"] == 1.5
    assert said["rounds"] == [
        {"frontier": 3, "proposed": [12, 13], "accepted": 2, "committed": 3},
        {"frontier": 4, "proposed": [12, 13], "accepted": 2, "committed": 3},
    ]
    assert said["logprobs"][4] == {
        "logprob": -0.5,
        "top_token_ids": [0, 1],
        "top_logprobs": [-0.5, -1.5],
    }


def test_json_without_logprobs_says_null(outrider, fake):
    out = outrider("generate", "--address", fake[1], "--json", "hello")[1]
    assert json.loads(out)["logprobs"] is None


@pytest.mark.parametrize(
    ("words", "stdin", "prompt"),
    [
        (["a b"], b"", pb.GenerateRequest(text="a b")),
        (["-"], b"from stdin\n", pb.GenerateRequest(text="from stdin")),
        ([], "zwei\nZeilen ü\n\n".encode(), pb.GenerateRequest(text="zwei\nZeilen ü\n")),
        ([], b"", pb.GenerateRequest(text="")),
        (["--prompt-ids", "1,2,3"], b"x", pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2, 3]))),
        (["--prompt-ids=7"], b"", pb.GenerateRequest(token_ids=pb.TokenIds(ids=[7]))),
    ],
)
def test_the_prompt_comes_from_argument_ids_or_standard_input(outrider, fake, words, stdin, prompt):
    assert outrider("generate", "--address", fake[1], *words, stdin=stdin)[0] == 0
    (request,) = fake[0].requests
    assert (request.text, request.token_ids) == (prompt.text, prompt.token_ids)
    assert request.WhichOneof("prompt") == prompt.WhichOneof("prompt")


def test_every_flag_reaches_its_field(outrider, fake):
    words = (
        "--max-tokens 9 --draft-tokens 3 --temperature 0.5 --top-p 0.25 --top-k 4 --min-p 0.125 "
        "--presence-penalty -1 --frequency-penalty 2 --repetition-penalty 1.5 --seed 12 "
        "--stop END --stop STOP --stop-token-ids 9,10 --ignore-eos --logprobs 5"
    )
    assert outrider("generate", "--address", fake[1], *words.split(), "hello")[0] == 0
    (request,) = fake[0].requests
    request.request_id = ""
    assert request == pb.GenerateRequest(
        text="hello",
        sampling=pb.Sampling(
            temperature=0.5,
            top_p=0.25,
            top_k=4,
            min_p=0.125,
            presence_penalty=-1,
            frequency_penalty=2,
            repetition_penalty=1.5,
            seed=12,
        ),
        max_tokens=9,
        stop=["END", "STOP"],
        stop_token_ids=[9, 10],
        ignore_eos=True,
        logprobs=5,
        draft_tokens=3,
    )


def test_flags_left_out_stay_absent(outrider, fake):
    outrider("generate", "--address", fake[1], "hello")
    (request,) = fake[0].requests
    assert not request.HasField("sampling")
    assert not request.HasField("draft_tokens")
    assert not request.HasField("ignore_eos")


@pytest.mark.parametrize("flag", [["--no-draft"], ["--draft-tokens", "0"]])
def test_drafting_can_be_left_out(outrider, fake, flag):
    outrider("generate", "--address", fake[1], *flag, "hello")
    request = fake[0].requests[0]
    assert request.HasField("draft_tokens")
    assert request.draft_tokens == 0


def test_trees_can_be_left_out(outrider, fake):
    outrider("generate", "--address", fake[1], "--no-trees", "hello")
    outrider("generate", "--address", fake[1], "hello")
    without, absent = fake[0].requests
    assert without.HasField("draft_trees")
    assert not without.draft_trees
    assert not absent.HasField("draft_trees")


@pytest.mark.parametrize(
    ("words", "count"),
    [
        (["--logprobs", "hello"], 0),
        (["hello", "--logprobs"], 0),
        (["--logprobs", "3", "hello"], 3),
        (["--logprobs=3", "hello"], 3),
    ],
)
def test_logprobs_may_stand_alone(outrider, fake, words, count):
    assert outrider("generate", "--address", fake[1], *words)[0] == 0
    (request,) = fake[0].requests
    assert (request.text, request.logprobs) == ("hello", count)
    assert request.HasField("logprobs")


def test_every_serve_flag_is_accepted_and_said_to_have_no_effect_on_a_running_server(
    outrider, fake
):
    words = "--target /t --draft /d --device cpu --dtype float32 --max-concurrency 2 --listen :7"
    code, out, err = outrider("generate", "--address", fake[1], *words.split(), "hello")
    assert (code, out) == (0, TEXT)
    for flag in words.split()[::2]:
        assert flag in err


@pytest.mark.parametrize(
    ("words", "stdin", "message"),
    [
        (["x", "--prompt-ids", "1"], b"", "expected PROMPT or --prompt-ids, got both"),
        (["--prompt-ids", "1,x"], b"", "argument --prompt-ids"),
        (["--prompt-ids", str(2**31)], b"", "prompt_ids: expected 32-bit token ids"),
        (["--seed", "-1", "x"], b"", "seed: expected a value its field can hold"),
        ([], b"\xff\xfe", "standard input: expected UTF-8"),
    ],
)
def test_a_prompt_that_is_none_is_wrong_use(outrider, fake, words, stdin, message):
    code, out, err = outrider("generate", "--address", fake[1], *words, stdin=stdin)
    assert (code, out) == (2, "")
    assert message in err


@pytest.mark.parametrize(
    ("reason", "code"),
    [("PROMPT_TOO_LONG", 2), ("MEDIA_UNSUPPORTED", 2), ("QUEUE_FULL", 1), ("INTERNAL", 1)],
)
@pytest.mark.parametrize("json_flag", [[], ["--json"]])
def test_a_refused_request_is_explained_and_its_code_says_whose_fault(
    outrider, fake, reason, code, json_flag
):
    ended, out, err = outrider("generate", "--address", fake[1], *json_flag, f"fault {reason}")
    assert (ended, out) == (code, "")
    assert f"{reason}: scripted: expected 1, got {reason}" in err
    assert "retry after 0.25 s" in err


def test_nobody_at_the_address_is_explained(outrider):
    code, _, err = outrider("generate", "--address", "127.0.0.1:1", "hello")
    assert code == 1
    assert "check the address" in err


def test_a_timeout_ends_the_request(outrider, fake):
    code, out, err = outrider("generate", "--address", fake[1], "--timeout", "0.3", "slow")
    assert code == 1
    assert out.startswith("x")
    assert "DEADLINE_EXPIRED" in err
    assert fake[0].gone.wait(10)


def command(*arguments, **kwargs):
    # elsewhere than in a checkout, whose own services would be found first
    return subprocess.Popen(
        [sys.executable, "-m", "outrider.cli", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        cwd=FAKES,
        # a suite that a shell began in the background would have it ignore interrupts
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        **kwargs,
    )


def test_an_interrupt_cancels_the_request(fake):
    child = command("generate", "--address", fake[1], "slow")
    assert child.stdout.read(1) == b"x"
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=30)
    assert (child.returncode, err) == (130, b"")
    assert fake[0].gone.wait(10)


def test_a_reader_that_leaves_cancels_the_request_quietly(fake):
    child = command("generate", "--address", fake[1], "slow")
    assert child.stdout.read(1) == b"x"
    child.stdout.close()
    assert child.stderr.read() == b""
    assert child.wait(30) == 1
    assert fake[0].gone.wait(10)


# --- a terminal


def on_terminal(arguments, typed=b"", wait_for=b"", env=None):
    """What the command shows on a terminal, and its exit code."""
    pid, terminal = pty.fork()
    if pid == 0:
        environment = {"TERM": "xterm-256color", "COLUMNS": "80"} | (env or {})
        inherited = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")}
        os.execve(
            sys.executable,
            [sys.executable, "-m", "outrider.cli", *arguments],
            inherited | environment,
        )
    shown, end, sent = b"", time.monotonic() + 60, False
    while time.monotonic() < end:
        if not sent and wait_for in shown:
            os.write(terminal, typed)
            sent = True
        if select.select([terminal], [], [], 0.1)[0]:
            try:
                chunk = os.read(terminal, 4096)
            except OSError:  # Linux's way to say that the other end closed
                break
            if not chunk:
                break
            shown += chunk
    os.close(terminal)
    return shown.decode().replace("\r\n", "\n"), os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_terminal_shows_where_each_token_came_from(fake):
    shown, code = on_terminal(["generate", "--address", fake[1], "hello"])
    assert code == 0
    assert "Once\x1b[32m \x1b[0m\x1b[32m€\x1b[0m\x1b[31m!\x1b[0m" in shown
    assert "\x1b[36m end" in shown
    assert "[5 tokens, 2 rounds, 2.00 tokens a round, stop]" in shown


def test_colours_can_be_declined(fake):
    shown, _ = on_terminal(["generate", "--address", fake[1], "hello"], env={"NO_COLOR": "1"})
    assert "\x1b[3" not in shown
    assert "Once €! end" in shown


def test_chat_on_a_terminal_keeps_the_conversation_and_ends_on_end_of_file(fake):
    shown, code = on_terminal(
        ["chat", "--address", fake[1]], typed=b"hi\nagain\n\x04", wait_for=b"> "
    )
    assert code == 0, shown
    assert shown.count("Once") == 2
    first, second = fake[0].requests
    assert [each.content for each in first.chat.messages] == ["hi"]
    assert [(each.role, each.content) for each in second.chat.messages] == [
        ("user", "hi"),
        ("assistant", TEXT),
        ("user", "again"),
    ]


# --- chat and info


def test_chat_with_piped_input_is_one_turn(outrider, fake):
    code, out, err = outrider(
        "chat", "--address", fake[1], "--system", "Be brief.", "--no-thinking", stdin=b"hi\nyou\n"
    )
    assert (code, out, err) == (0, TEXT, "")
    (request,) = fake[0].requests
    assert [(each.role, each.content) for each in request.chat.messages] == [
        ("system", "Be brief."),
        ("user", "hi\nyou"),
    ]
    assert request.chat.HasField("enable_thinking")
    assert not request.chat.enable_thinking


def test_info_describes_pair_and_server(outrider, fake):
    code, out, _ = outrider("info", "--address", fake[1])
    assert code == 0
    for words in ("model_name           fake", "eos_token_ids        15, 16", "connected"):
        assert words in out
    said = json.loads(outrider("info", "--address", fake[1], "--json")[1])
    assert said["model"]["public_vocab"] == 300
    assert said["server"]["counters"] == {"rounds": 2}


# --- the demo's summary


def completion(usage, token_ids=TOKEN_IDS):
    return Completion("id", 0, token_ids, TEXT, "length", None, usage, (), (), ())


def test_the_summary_reports_speed_accept_length_and_the_ratio():
    drafted = Usage(
        output_tokens=161,
        rounds=40,
        accepted_per_position=(36, 20, 10),
        ttft_ns=10**9,
        total_ns=3 * 10**9,
    )
    plain = Usage(output_tokens=161, rounds=160, ttft_ns=10**9, total_ns=5 * 10**9)
    lines = demo.summary([completion(drafted)], [completion(plain)]).splitlines()
    assert [line.split("  ")[0] for line in lines] == [
        "tokens",
        "tokens per second",
        "rounds",
        "accept length",
        "accepted per position",
        "without drafting",
        "output",
    ]
    text = "\n".join(lines)
    for words in ("161 (length)", "80.0", "4.00 tokens a round", "90%, 50%, 25% of rounds"):
        assert words in text
    assert "40.0 tokens per second; drafting is 2.00 times as fast" in text
    different = demo.summary([completion(drafted)], [completion(plain, (1,))])
    assert "the same tokens" not in different


def test_the_summary_of_one_token_divides_by_nothing():
    empty = Usage(output_tokens=1, accepted_per_position=(0, 0))
    assert "0.00 tokens a round" in demo.summary([completion(empty)], [completion(empty)])


def test_the_demo_streams_and_compares(outrider, fake):
    code, out, _ = outrider("demo", "--address", fake[1], "hello ")
    assert code == 0
    assert out.startswith(f"hello {TEXT}")
    assert "accept length          2.00 tokens a round" in out
    drafting = [
        each.draft_tokens if each.HasField("draft_tokens") else None for each in fake[0].requests
    ]
    # a short one of each to warm up, then by turns
    assert drafting == [None, 0] * (1 + demo.TURNS)
    assert all(each.sampling.temperature == 0 for each in fake[0].requests)


# --- the base install


def test_generate_works_on_the_base_install(base_install, fake):
    code = "from outrider.cli import main; sys.exit(main(sys.argv[1:]))"
    done = base_install(code, "generate", "--address", fake[1], "--json", "hello")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["text"] == TEXT
    done = base_install(code, "generate", "--address", fake[1], "hello")
    assert (done.returncode, done.stdout, done.stderr) == (0, TEXT, "")
    assert base_install(code, "info", "--address", fake[1]).returncode == 0
    assert base_install(code, "chat", "--address", fake[1], input="hi").stdout == TEXT


@pytest.mark.parametrize("verb", [["serve"], ["generate", "hello"], ["chat"], ["demo"]])
def test_what_needs_the_services_names_the_extra_to_install(base_install, verb):
    done = base_install("from outrider.cli import main; sys.exit(main(sys.argv[1:]))", *verb)
    assert (done.returncode, done.stdout) == (2, "")
    assert "outrider[serve]" in done.stderr
    assert "pip install '.[serve]'" in done.stderr
    assert "Traceback" not in done.stderr


# --- supervision


class World:
    """A supervised pair of fakes: what they logged, and which of them still run."""

    def __init__(self, folder):
        self.log = folder / "log"

    def env(self, drafter="", verifier=""):
        path = os.pathsep.join(filter(None, [str(FAKES), os.environ.get("PYTHONPATH")]))
        return os.environ | {
            "PYTHONPATH": path,
            "FAKE_LOG": str(self.log),
            "FAKE_DRAFTER": drafter,
            "FAKE_VERIFIER": verifier,
        }

    def events(self, name=None, what=None):
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        rows = [line.split() for line in lines]
        return [row for row in rows if name in (None, row[0]) and what in (None, row[2])]

    def pids(self, name=None):
        return [int(row[1]) for row in self.events(name, "started")]

    def nobody_left(self, timeout=10.0):
        end = time.monotonic() + timeout
        while any(_runs(pid) for pid in self.pids()):
            if time.monotonic() > end:
                return False
            time.sleep(0.02)
        return bool(self.pids())


def _runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def world(tmp_path):
    made = World(tmp_path)
    yield made
    for pid in made.pids():
        if _runs(pid):
            os.kill(pid, signal.SIGKILL)


@contextmanager
def serving_pair(world, *words, ready=True, **orders):
    """`outrider serve` over the fakes; yields (process, address)."""
    child = command("serve", "--listen", "127.0.0.1:0", *words, env=world.env(**orders))
    try:
        address = None
        if ready:
            word, address = child.stdout.readline().decode().split()
            assert word == "ready"
        yield child, address
    finally:
        if child.poll() is None:
            child.kill()
        child.communicate()


def test_serve_says_ready_once_and_serves_there(world, outrider):
    with serving_pair(world) as (child, address):
        assert outrider("generate", "--address", address, "hello")[1] == TEXT
        child.terminate()
        out, err = child.communicate(timeout=30)
        assert (child.returncode, out, err) == (0, b"", b"")
    assert world.nobody_left()


def test_each_service_gets_its_own_flags_and_the_drafters_address(world):
    words = ["--draft-tokens=3", "--target=/t", "--checkpoint-grace=2", "--max-queue=5"]
    with serving_pair(world, *words, ready=True):
        (drafter,), (verifier,) = world.events("drafter"), world.events("verifier")
    assert set(drafter[3:]) == {
        "--listen=127.0.0.1:0",
        "--draft-tokens=3",
        "--target=/t",
        "--checkpoint-grace=2.0",
    }
    passed = dict(word.split("=", 1) for word in verifier[3:])
    assert passed.pop("--drafter").startswith("127.0.0.1:")
    assert passed == {
        "--listen": "127.0.0.1:0",
        "--draft-tokens": "3",
        "--target": "/t",
        "--max-queue": "5",
    }


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_drains_the_verifier_before_the_drafter(world, number):
    with serving_pair(world, verifier="slow-drain") as (child, _):
        child.send_signal(number)
        assert child.wait(30) == 0
    order = [(row[0], row[2]) for row in world.events() if row[2] != "started"]
    assert order == [
        ("verifier", "draining"),
        ("verifier", "ended"),
        ("drafter", "draining"),
        ("drafter", "ended"),
    ]
    assert world.nobody_left()


def test_a_drain_that_takes_too_long_is_ended(world):
    hurried = (
        "import sys; from outrider.cli import main, serve; serve.STOP_GRACE = 0.3\n"
        "sys.exit(main(['serve', '--listen=127.0.0.1:0', '--drain-timeout=0']))"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", hurried],
        env=world.env(verifier="stubborn"),
        cwd=FAKES,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert child.stdout.readline().startswith(b"ready ")
    child.terminate()
    _, err = child.communicate(timeout=30)
    assert child.returncode == 0
    assert b"the verifier did not end" in err
    assert world.nobody_left(0)


def test_a_second_signal_kills_at_once(world):
    with serving_pair(world, verifier="stubborn") as (child, _):
        child.terminate()
        end = time.monotonic() + 10
        while not world.events("verifier", "draining") and time.monotonic() < end:
            time.sleep(0.02)
        before = time.monotonic()
        child.terminate()
        child.wait(30)
        assert time.monotonic() - before < 5
    assert world.nobody_left()


def test_a_killed_drafter_is_started_again_at_its_address_while_the_verifier_serves_on(
    world, outrider
):
    with serving_pair(world) as (child, address):
        (first,) = world.pids("drafter")
        os.kill(first, signal.SIGKILL)
        assert outrider("generate", "--address", address, "hello")[1] == TEXT
        end = time.monotonic() + 20
        while len(world.pids("drafter")) < 2 and time.monotonic() < end:
            time.sleep(0.02)
        (_, again), (verifier,) = world.events("drafter", "started"), world.events("verifier")
        assert f"--drafter={again[3].partition('=')[2]}" in verifier
        assert outrider("generate", "--address", address, "hello")[1] == TEXT
        child.terminate()
        _, err = child.communicate(timeout=30)
    assert b"the drafter ended (signal 9); the verifier serves on without drafts" in err
    assert world.nobody_left()


def test_a_drafter_that_keeps_dying_is_started_ever_more_slowly():
    services = serve.Services(
        parsed_serve_flags(),
    )
    waits = []
    for _ in range(9):
        services._drafter_ended(_Dead(), 1)
        waits.append(services._restart_at - time.monotonic())
    assert [round(wait, 1) for wait in waits] == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    services._drafter_ended(_Dead(ready=True, started=time.monotonic() - 61), 1)
    assert round(services._restart_at - time.monotonic(), 1) == 0.5


class _Dead:
    def __init__(self, ready=False, started=0.0):
        self.ready, self.started = ready, started


def parsed_serve_flags(*words):
    import argparse

    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    return parser.parse_args(words)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, 137), (signal.SIGTERM, 0)])
def test_a_verifier_that_dies_ends_it_with_its_exit_code(world, number, code):
    with serving_pair(world) as (child, _):
        (verifier,) = world.pids("verifier")
        os.kill(verifier, number)
        _, err = child.communicate(timeout=30)
        assert child.returncode == code
    assert b"the verifier ended" in err
    assert world.nobody_left()


@pytest.mark.parametrize("which", ["drafter", "verifier"])
def test_a_service_that_refuses_to_start_ends_it_with_its_exit_code_and_words(world, which):
    with serving_pair(world, ready=False, **{which: "exit-3"}) as (child, _):
        out, err = child.communicate(timeout=30)
        assert (child.returncode, out) == (3, b"")
    assert f"error: {which} refuses".encode() in err
    assert f"the {which} ended before it was ready (exit code 3)".encode() in err
    assert world.nobody_left()


def test_a_signal_before_it_is_ready_ends_it(world):
    with serving_pair(world, ready=False, verifier="never-ready") as (child, _):
        end = time.monotonic() + 20
        while not world.events("verifier") and time.monotonic() < end:
            time.sleep(0.02)
        child.terminate()
        out, _ = child.communicate(timeout=30)
        assert (child.returncode, out) == (0, b"")
    assert world.nobody_left()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
def test_nobody_is_left_when_the_supervisor_is_killed(world):
    with serving_pair(world) as (child, _):
        child.kill()
        child.wait()
        assert world.nobody_left()


def test_generate_starts_the_services_it_needs_and_stops_them(world):
    child = command("generate", "hello", "--json", "--draft-tokens", "0", env=world.env())
    out, err = child.communicate(timeout=60)
    assert (child.returncode, err) == (0, b"")
    assert out.count(b"\n") == 1
    assert json.loads(out)["text"] == TEXT
    assert not any("--draft-tokens" in word for row in world.events() for word in row)
    assert world.nobody_left(0)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_generate_leaves_nobody_behind_when_it_is_stopped(world, number, code):
    child = command("generate", "slow", env=world.env())
    assert child.stdout.read(1) == b"x"
    child.send_signal(number)
    child.communicate(timeout=30)
    assert child.returncode == code
    assert world.nobody_left(0)


def test_generate_ends_with_the_code_of_a_service_that_refuses(world):
    child = command("generate", "hello", env=world.env(drafter="exit-2"))
    out, err = child.communicate(timeout=60)
    assert (child.returncode, out) == (2, b"")
    assert b"error: drafter refuses" in err
    assert world.nobody_left(0)
