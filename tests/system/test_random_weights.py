"""A shrunken geometry without weights, served by both services."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import pytest

from outrider import cli
from outrider.client import Client, ClientError
from tests.shrunken import save_shrunken
from tests.tiny_pair import served
from verifier.__main__ import start
from verifier.options import VerifierOptions

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


@pytest.fixture(scope="module")
def shrunken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_shrunken(tmp_path_factory.mktemp("shrunken"))


def serve(folder: Path, **options: object):
    return served(folder / "target", folder / "dflash2", load_format="random", **options)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_greedy_request_is_drafted_for_and_comes_out_alike_every_time(shrunken: Path, dtype):
    outputs = []
    for _ in range(2):
        with serve(shrunken, dtype=dtype) as pair, Client(pair.address) as client:
            # both drew the same: the handshake compared embedding and head
            assert client.server_info().drafter_state == "connected"
            done = client.generate(prompt_ids=PROMPT, max_tokens=40, temperature=0, ignore_eos=True)
            assert done.usage.proposed > 0
            outputs.append(done.token_ids)
    assert outputs[0] == outputs[1]
    assert len(set(outputs[0])) > 5  # finite and moving, not one token over and over


def test_what_needs_a_tokenizer_is_refused_and_the_rest_goes_on(shrunken: Path):
    with serve(shrunken) as pair, Client(pair.address) as client:
        with pytest.raises(
            ClientError, match="expected token ids, the checkpoint has no tokenizer"
        ):
            client.generate("text", max_tokens=2)
        with pytest.raises(ClientError, match="no chat template"):
            client.generate(messages=[{"role": "user", "content": "hello"}], max_tokens=2)
        with pytest.raises(ClientError, match="stop: expected none, the checkpoint has no tok"):
            client.generate(prompt_ids=PROMPT, stop=["x"], max_tokens=2)
        done = client.generate(prompt_ids=PROMPT, max_tokens=2, ignore_eos=True)
        assert (len(done.token_ids), done.text) == (2, "")


def test_a_server_of_drawn_weights_says_so(shrunken: Path):
    with serve(shrunken) as pair:
        with Client(pair.address) as client:
            assert client.server_info().load_format == "random"
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            assert cli.main(["info", f"--address={pair.address}"]) == 0
    assert "the output is noise" in printed.getvalue()


def test_drawn_and_read_weights_do_not_pair(dense: Path):
    with served(dense / "target", dense / "dflash2") as pair:
        options = VerifierOptions(
            target=dense / "target",
            draft=dense / "dflash2",
            drafter=pair.drafter.address,
            listen="127.0.0.1:0",
            max_context=512,
            load_format="random",
        )
        verifier = start(options)
        try:
            with Client(verifier.address) as client:
                done = client.generate(prompt_ids=PROMPT, max_tokens=4, ignore_eos=True)
                assert done.usage.proposed == 0
                server = client.server_info()
                assert server.drafter_state == "refused"
                assert "embedding_digest" in server.drafter_detail
        finally:
            verifier.stop(0)
