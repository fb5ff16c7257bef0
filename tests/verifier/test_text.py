"""Decoding by pieces equals the tokenizer's own; templates render as published ones expect."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers.utils.chat_template_utils import render_jinja_template

from outrider.checkpoint import Checkpoint, CheckpointError
from outrider.faults import FaultError
from verifier.text import Text, decode_step

MODELS = Path(__file__).resolve().parents[2] / "models" / "bundled" / "target"

# bytes that begin, continue and break sequences of every length
EDGES = st.sampled_from(
    list(b"aZ \x80\x8f\x90\x9f\xa0\xbf\xc0\xc2\xdf\xe0\xe1\xed\xef\xf0\xf1\xf4\xf5\xff")
)


def by_pieces(pieces: list[bytes]) -> str:
    shown, pending = [], b""
    for piece in pieces:
        text, pending = decode_step(pending, piece)
        shown.append(text)
    return "".join(shown) + ("\ufffd" if pending else "")


@settings(max_examples=400, deadline=None)
@given(st.lists(st.lists(EDGES, max_size=4).map(bytes), max_size=12))
def test_pieces_of_any_bytes_decode_as_the_whole(pieces):
    assert by_pieces(pieces) == b"".join(pieces).decode("utf-8", "replace")


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=20))
def test_a_character_appears_with_its_last_byte_and_not_before(written):
    pending, count = b"", 0
    for position, byte in enumerate(written.encode()):
        shown, pending = decode_step(pending, bytes([byte]))
        count += len(shown)
        whole = written.encode()[: position + 1].decode("utf-8", "ignore")
        assert count == len(whole)
    assert pending == b""


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_ids_decode_as_the_tokenizer_does(tokenizer: Tokenizer, text: Text, data):
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() + 3), max_size=24))
    assert text.decode(ids, skip_special_tokens=False) == tokenizer.decode(
        ids, skip_special_tokens=False
    )
    shown = tokenizer.decode(ids, skip_special_tokens=True)
    assert text.decode(ids) == shown
    assert text.decoded_bytes(ids) <= len(shown.encode())
    assert by_pieces([text.shown_bytes(i) for i in ids]) == shown


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=40))
def test_text_survives_the_round_trip(text: Text, written):
    assert text.decode(text.encode(written), skip_special_tokens=False) == written


def test_special_tokens_are_not_shown_and_added_ones_that_are_not_special_are(tokenizer, text):
    ids = text.encode("<|im_start|>a<think>b<a b><|im_end|>")
    assert tokenizer.token_to_id("<|im_start|>") == ids[0]
    assert b"".join(text.shown_bytes(i) for i in ids) == b"a<think>b<a b>"


def test_a_character_may_be_completed_across_a_special_token(tokenizer, text):
    euro = [tokenizer.token_to_id(c) for c in ("â", "Ĥ", "¬")]
    end = tokenizer.token_to_id("<|im_end|>")
    ids = [euro[0], end, euro[1], euro[2]]
    assert text.decode(ids) == tokenizer.decode(ids) == "€"


def test_without_a_tokenizer_ids_have_no_text_and_text_has_no_ids():
    absent = Text(None)
    assert not absent.has_tokenizer and absent.decode([1, 2]) == ""
    with pytest.raises(FaultError, match="REQUEST_INVALID: text: expected token ids"):
        absent.encode("a")


def test_a_tokenizer_of_another_kind_is_refused():
    other = Tokenizer(models.BPE())
    other.pre_tokenizer = pre_tokenizers.Metaspace()
    other.decoder = decoders.Metaspace()
    with pytest.raises(CheckpointError, match="expected ByteLevel, got Metaspace"):
        Text(other)


def test_load_reads_tokenizer_template_and_special_tokens(tmp_path, tokenizer):
    (tmp_path / "config.json").write_text("{}")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "<|im_end|>"}, "pad_token": "<|endoftext|>"})
    )
    (tmp_path / "chat_template.jinja").write_text(
        "{{ eos_token }}{{ pad_token }}{{ messages[0].content }}"
    )
    loaded = Text.load(Checkpoint(tmp_path))
    assert loaded.has_tokenizer and loaded.has_template
    assert loaded.render([{"role": "user", "content": "x"}]) == "<|im_end|><|endoftext|>x"


def test_load_without_tokenizer_and_template(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    loaded = Text.load(Checkpoint(tmp_path))
    assert not loaded.has_tokenizer and not loaded.has_template
    with pytest.raises(FaultError, match="TEMPLATE_FAILED: chat: the checkpoint has no"):
        loaded.render([{"role": "user", "content": "x"}])


# what published templates lean on: whitespace control, JSON without escapes, loop controls, marks
TEMPLATE = """\
{%- for message in messages %}
    {% if message.role == 'skip' %}{% continue %}{% endif %}
    {%- if message.role == 'assistant' %}
        {% generation %}
[{{ message.role }}] {{ message.content | trim }}
        {% endgeneration %}
    {% else %}
[{{ message.role }}] {{ message.content }}
    {% endif %}
{% endfor %}
{% if tools %}{{ tools | tojson }}|{{ tools | tojson(indent=2, sort_keys=true) }}{% endif %}
{% if add_generation_prompt %}[assistant]{% endif %}
{{ enable_thinking | default('unset') }}
{%- set ns = namespace(n=0) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}
"""
CHAT = [
    {"role": "user", "content": "1 < 2 & 'q' <|im_end|>\n"},
    {"role": "skip", "content": "unseen"},
    {"role": "assistant", "content": "  sí  "},
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": '<é & "x">'}}]


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no_tools", "tools"])
@pytest.mark.parametrize("prompt", [True, False], ids=["prompt", "no_prompt"])
@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False}], ids=["default", "off"])
def test_a_template_renders_as_transformers_renders_it(tools, prompt, variables):
    expected, _ = render_jinja_template(
        [CHAT], tools=tools, chat_template=TEMPLATE, add_generation_prompt=prompt, **variables
    )
    got = Text(None, TEMPLATE).render(CHAT, tools=tools, add_generation_prompt=prompt, **variables)
    assert got == expected[0]


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no_tools", "tools"])
@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False}], ids=["default", "off"])
def test_the_bundled_template_renders_as_transformers_renders_it(tools, variables):
    template = (MODELS / "chat_template.jinja").read_text()
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hej <b>"},
        {"role": "assistant", "content": "Hm.", "reasoning_content": "A greeting."},
        {"role": "user", "content": "And?"},
    ]
    expected, _ = render_jinja_template(
        [chat], tools=tools, chat_template=template, add_generation_prompt=True, **variables
    )
    assert Text(None, template).render(chat, tools=tools, **variables) == expected[0]


def test_strftime_now_is_there():
    assert Text(None, "{{ strftime_now('%Y') }}").render([]).isdigit()


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('No user query.') }}", "No user query."),
        ("{{ messages[0].content + 1 }}", "can only concatenate"),
        ("{{ messages[7].content.x }}", "undefined|no element"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not safely callable|access"),
    ],
    ids=["refuses", "type_error", "undefined", "sandbox_attribute", "sandbox_mutation"],
)
def test_a_template_that_fails_is_a_fault(template, message):
    with pytest.raises(FaultError, match=message) as caught:
        Text(None, template).render([{"role": "user", "content": "x"}])
    assert caught.value.reason == "TEMPLATE_FAILED"


def test_a_template_that_does_not_compile_is_refused_at_load():
    with pytest.raises(CheckpointError, match="chat template"):
        Text(None, "{% if %}")
