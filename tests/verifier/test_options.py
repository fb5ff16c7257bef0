"""Flags outside their range are refused before anything is read."""

import pytest

from verifier.options import DRAFT_TIMEOUT_MS, OptionError, parse


@pytest.mark.parametrize(
    "flag",
    [
        "--max-concurrency=9",
        "--prefill-chunk=-1",
        "--max-queue=-1",
        "--draft-timeout-ms=0",
        "--draft-timeout-ms=-5",
        "--queue-timeout-ms=-1",
        "--drain-timeout=-1",
        "--drain-timeout=nan",
        "--drain-timeout=inf",
    ],
)
def test_a_flag_outside_its_range_is_refused_by_name(flag):
    with pytest.raises(OptionError, match=f"{flag.partition('=')[0]}: expected"):
        parse(["--device=cpu", flag])


def test_the_draft_timeout_depends_on_the_device():
    assert parse(["--device=cpu"]).draft_timeout_ms == DRAFT_TIMEOUT_MS["cpu"]
    assert parse(["--device=cpu", "--draft-timeout-ms=7"]).draft_timeout_ms == 7
