"""`outrider bench serve` against the scripted service, its arithmetic, and its chart."""

import asyncio
import json
import statistics
import time
from xml.etree import ElementTree

import pytest
from fake_generation import TOKEN_IDS, USAGE

from outrider import cli
from outrider.cli import bench, load
from outrider.cli.chart import Line, Panel, svg
from outrider.cli.load import Answer, Point, Spread, percentile, summarise
from outrider.client import AsyncClient, Usage

SVG = "{http://www.w3.org/2000/svg}"


def point(**changes):
    plain = {
        "loop": "closed",
        "load": 4,
        "drafting": True,
        "seconds": 2.0,
        "finished": 8,
        "errors": {},
        "output_tokens": 100,
        "tokens_per_round": 3.0,
        "ttft": Spread(1, 2, 3),
        "inter_token": Spread(4, 5, 6),
        "gap": Spread(7, 8, 9),
    }
    return Point(**plain | changes)


def figures(spread):
    return spread.p50, spread.p90, spread.p99


# --- arithmetic


@pytest.mark.parametrize("count", [1, 2, 5, 100])
def test_percentiles_interpolate_between_ranks(count):
    ranked = sorted((7919 * i) % 1000 / 10 for i in range(count))
    assert percentile(ranked, 0) == ranked[0]
    assert percentile(ranked, 100) == ranked[-1]
    assert percentile(ranked, 50) == pytest.approx(statistics.median(ranked))
    if count > 2:
        cuts = statistics.quantiles(ranked, n=100, method="inclusive")
        assert [percentile(ranked, q) for q in (90, 99)] == pytest.approx([cuts[89], cuts[98]])


def test_tokens_of_one_message_share_the_wait_for_it():
    usage = Usage(output_tokens=7, rounds=2)
    answer = Answer(10.0, [(10.5, 1), (10.9, 4), (11.1, 2)], 11.2, usage)
    found = summarise("closed", 1, True, [answer])
    # four tokens at 0.1 s and two at 0.1 s; messages at 0.4 s and 0.2 s
    assert figures(found.inter_token) == pytest.approx((100, 100, 100))
    assert figures(found.gap) == pytest.approx((300, 380, 398))
    assert figures(found.ttft) == pytest.approx((500, 500, 500))
    assert found.tokens_per_round == 3.0
    assert (found.seconds, found.finished, found.output_tokens) == (pytest.approx(1.2), 1, 7)
    assert found.tokens_per_second == pytest.approx(7 / 1.2)


def test_a_failed_answer_counts_as_an_error_and_in_no_figure():
    good = Answer(0.0, [(1.0, 1)], 2.0, Usage(output_tokens=1))
    bad = Answer(0.0, [(9.0, 5)], 4.0, None, "QUEUE_FULL")
    found = summarise("open", 2, False, [good, bad, bad])
    assert found.errors == {"QUEUE_FULL": 2}
    assert (found.finished, found.output_tokens, found.ttft.p99) == (1, 1, 1000.0)
    assert (found.seconds, found.requests_per_second) == (4.0, 0.25)
    assert found.tokens_per_round is None and found.gap is None


def test_the_ratio_is_that_of_the_same_load_without_drafting():
    plain, other = point(drafting=False, output_tokens=50), point(drafting=False, load=8)
    assert bench.speedup(point(), [other, plain, point()]) == 2.0
    assert bench.speedup(plain, [plain, point()]) is None
    assert bench.speedup(point(), [other, point()]) is None


# --- loops


def run(loop, address, *arguments):
    async def inside():
        async with AsyncClient(address) as client:
            return await loop(client, lambda n: (f"prompt {n}", {"timeout": 20}), *arguments)

    return asyncio.run(inside())


def test_a_closed_loop_keeps_its_readers_busy_and_waits_for_the_last(fake):
    service, address = fake
    answers = run(load.closed_loop, address, 3, 0.5)
    assert len(answers) == len(service.requests) > 6
    assert all(answer.fault is None and answer.usage for answer in answers)
    moments = sorted(
        [(a.due_at, 1) for a in answers] + [(a.ended_at, -1) for a in answers], key=lambda m: m[0]
    )
    running, most = 0, 0
    for _, change in moments:
        running += change
        most = max(most, running)
    assert (running, most) == (0, 3)
    assert {request.text for request in service.requests} == {
        f"prompt {n}" for n in range(len(answers))
    }


def test_an_open_loop_asks_on_time_whatever_still_runs(fake, monkeypatch):
    service, address = fake
    whole = service._whole

    def late(request, index):
        time.sleep(0.3)
        yield from whole(request, index)

    monkeypatch.setattr(service, "_whole", late)
    answers = run(load.open_loop, address, 20, 1.0, 5)
    again = run(load.open_loop, address, 20, 1.0, 5)
    assert 8 < len(answers) < 40
    offsets = [answer.due_at - answers[0].due_at for answer in answers]
    assert offsets == pytest.approx([a.due_at - again[0].due_at for a in again])
    # 20 a second at 0.3 s each is 6 at once on average; one reader alone would need far longer
    assert max(a.ended_at for a in answers) - answers[0].due_at < 0.3 * len(answers)
    assert all(answer.arrivals[0][0] - answer.due_at > 0.29 for answer in answers)


# --- the verb


@pytest.fixture
def outrider(capsys):
    def run(*arguments):
        try:
            code = cli.main([str(each) for each in arguments])
        except SystemExit as end:
            code = end.code
        out, err = capsys.readouterr()
        return code, out, err

    return run


def test_every_load_runs_both_ways_and_is_printed_saved_and_drawn(fake, outrider, tmp_path):
    service, address = fake
    saved, drawn = tmp_path / "figures.json", tmp_path / "figures.svg"
    code, out, err = outrider(
        *("bench", "serve", "--address", address, "--concurrency", "1,2", "--rates", "30"),
        *("--duration", "0.3", "--json", saved, "--plot", drawn),
    )
    assert (code, err) == (0, "")
    first, heading, *rows = out.splitlines()
    assert first.startswith("fake, ") and "drafter connected" in first
    assert heading.split()[:2] == ["load", "drafting"]
    labels = [row.split()[:2] for row in rows]
    loads = ("c=1", "c=2", "30/s")
    assert labels == [[name, way] for name in loads for way in ("off", "on")]
    plain = [r for r in service.requests if r.HasField("draft_tokens")]
    drafted = [r for r in service.requests if not r.HasField("draft_tokens")]
    assert {request.draft_tokens for request in plain} == {0} and drafted

    found = json.loads(saved.read_text())
    assert found["model"]["model_name"] == "fake" and found["server"]["version"] == "0.1.0"
    points = found["points"]
    assert [(p["loop"], p["load"], p["drafting"]) for p in points] == [
        (loop, amount, way)
        for loop, amount in (("closed", 1), ("closed", 2), ("open", 30))
        for way in (False, True)
    ]
    for each in points:
        assert each["output_tokens"] == len(TOKEN_IDS) * each["finished"] > 0
        assert each["tokens_per_round"] == (USAGE["output_tokens"] - 1) / USAGE["rounds"]
        assert each["tokens_per_second"] == pytest.approx(each["output_tokens"] / each["seconds"])
        assert 0 < each["ttft"]["p50"] <= each["ttft"]["p99"] and each["errors"] == {}

    root = ElementTree.fromstring(drawn.read_text())
    titles = [text.text for text in root.iter(f"{SVG}text")]
    assert titles.count("tokens a second") == titles.count("tokens a round") == 2
    assert len(list(root.iter(f"{SVG}polyline"))) == 2 * (2 + 4 + 4 + 2)


def test_requests_are_the_same_ones_at_every_load(fake, outrider, tmp_path):
    service, address = fake
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\n\ntwo\n")
    shared = ("bench", "serve", "--address", address, "--duration", "0.1", "--drafting", "on")
    assert outrider(*shared, "--concurrency", "1", "--prompts", prompts)[0] == 0
    assert [request.text for request in service.requests[1:5]] == ["one", "two", "one", "two"]
    assert [request.sampling.seed for request in service.requests[1:4]] == [1, 2, 3]
    assert all(request.ignore_eos for request in service.requests)
    service.requests.clear()
    ids = ("--prompt-tokens", "40", "--stop-at-eos", "--max-tokens", "9")
    assert outrider(*shared, "--concurrency", "1,2", *ids)[0] == 0
    sent = {}
    for request in service.requests:
        assert not request.ignore_eos
        assert len(request.token_ids.ids) == 40 and max(request.token_ids.ids) < 300
        held = sent.setdefault(request.sampling.seed, list(request.token_ids.ids))
        assert held == list(request.token_ids.ids)
    assert {request.max_tokens for request in service.requests} == {8, 9}
    assert len({tuple(ids) for ids in sent.values()}) == len(sent) > 1


def test_errors_are_counted_by_reason_and_a_load_without_answers_fails(fake, outrider, tmp_path):
    service, address = fake
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("fault QUEUE_FULL\nfault-later\n")
    code, out, err = outrider(
        *("bench", "serve", "--address", address, "--concurrency", "2", "--duration", "0.2"),
        *("--drafting", "off", "--prompts", prompts),
    )
    assert code == 1
    row = out.splitlines()[-1]
    assert "LOGITS_NOT_FINITE " in row and "QUEUE_FULL " in row
    assert "c=2: expected answers, got errors alone" in err
    # refusals come at once, and yet the server is not hammered
    assert len(service.requests) < 40


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--concurrency", "0"), "no load"),
        (("--concurrency", "-1"), "above 0"),
        (("--rates", "0"), "above 0"),
        (("--duration", "0"), "above 0"),
        (("--concurrency", "x"), "--concurrency"),
        (("--prompts", "/nowhere"), "--prompts"),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, tuple) else "",
)
def test_a_load_that_cannot_be_is_wrong_use(fake, outrider, words, complaint):
    code, _, err = outrider("bench", "serve", "--address", fake[1], *words)
    assert code == 2 and complaint in err


def test_an_address_where_nobody_is_ends_with_one_line(outrider):
    code, _, err = outrider("bench", "serve", "--address", "127.0.0.1:9", "--timeout", "5")
    assert code == 1 and len(err.splitlines()) <= 2 and "Traceback" not in err


def test_the_base_install_is_enough(fake, base_install, tmp_path):
    words = ["bench", "serve", "--address", fake[1], "--concurrency=1", "--duration=0.1"]
    drawn = tmp_path / "plot.svg"
    done = base_install(
        "from outrider.cli import main\nsys.exit(main(sys.argv[1:]))\n", *words, f"--plot={drawn}"
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert drawn.exists()


# --- the chart


@pytest.mark.parametrize("top", [1e-9, 0.3, 1, 7, 9.5, 99, 123456])
def test_every_point_lies_within_its_panel(top):
    lines = [Line("a", [0, top / 2, top], "#000"), Line("b <&>", [None, top, None], "#111", True)]
    root = ElementTree.fromstring(svg("h", [[Panel("t", "x", ["1", "2", "4"], lines)]]))
    circles = [(float(c.get("cx")), float(c.get("cy"))) for c in root.iter(f"{SVG}circle")]
    assert len(circles) == 4
    assert all(58 <= x <= 324 and 34 <= y <= 214 for x, y in circles)
    assert circles[0][1] == 214 and circles[0][0] < circles[1][0] < circles[2][0]
    assert "b <&>" in [text.text for text in root.iter(f"{SVG}text")]


def test_a_panel_without_any_value_is_empty_and_no_error():
    root = ElementTree.fromstring(svg("h", [[Panel("t", "x", ["1"], [Line("a", [None], "#0")])]]))
    assert not list(root.iter(f"{SVG}circle"))
