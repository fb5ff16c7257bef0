"""The bundled pair reads the same through public implementations as through its trainer."""

import json

import pytest
import torch

from models.training.export import load_draft, load_target
from models.training.gated_delta import chunked_rule, step_rule
from models.training.places import BUNDLE, PROMPTS
from models.training.shapes import DRAFTS
from models.training.tokenizer import PUBLIC_VOCAB, chat_template, encode, load_tokenizer

CPU = torch.device("cpu")
FRONTIER = 140


@pytest.fixture(scope="module")
def token_ids() -> torch.Tensor:
    """Two rows of held-out text, longer than the drafts' window."""
    prompts = json.loads(PROMPTS.read_text(encoding="utf-8"))["prompts"]
    rows = [[*prompts[i]["token_ids"], *prompts[i + 1]["token_ids"]] for i in (0, 60)]
    return torch.tensor(rows)[:, :160]


def test_files_stay_within_28_megabytes() -> None:
    assert sum(path.stat().st_size for path in BUNDLE.rglob("*.*")) <= 28_000_000


def test_target_equals_transformers(token_ids: torch.Tensor) -> None:
    transformers = pytest.importorskip("transformers")
    oracle = transformers.Qwen3_5ForCausalLM.from_pretrained(BUNDLE / "target", dtype=torch.float32)
    with torch.no_grad():
        expected = oracle(token_ids, output_hidden_states=True)
        target = load_target(BUNDLE, CPU)
        hidden, features = target(token_ids, (1, 4))
    torch.testing.assert_close(target.logits(hidden), expected.logits, atol=1e-4, rtol=0)
    boundaries = torch.cat([expected.hidden_states[block + 1] for block in (1, 4)], -1)
    torch.testing.assert_close(features, boundaries, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", DRAFTS)
def test_draft_equals_its_reference_package(name: str, token_ids: torch.Tensor) -> None:
    reference = pytest.importorskip("dflash.model")
    classes = {"dflash2": reference.DFlash2DraftModel, "dflash": reference.DFlashDraftModel}
    oracle = classes[name].from_pretrained(BUNDLE / name, dtype=torch.float32)
    target, draft = load_target(BUNDLE, CPU), load_draft(name, BUNDLE, CPU)
    anchors = token_ids[:, FRONTIER : FRONTIER + 1]
    with torch.no_grad():
        features = target(token_ids, draft.shape.taps)[1]
        block = draft.embed_block(target.embedding, anchors, draft.shape.block)
        actual = draft(block, features, torch.full_like(anchors, FRONTIER))[:, 0]
        expected = oracle(
            position_ids=torch.arange(FRONTIER + draft.shape.block)[None].expand(2, -1),
            noise_embedding=block[:, 0],
            target_hidden=features[:, :FRONTIER],
        )
    torch.testing.assert_close(actual, expected, atol=2e-4, rtol=0)


def test_chunked_rule_and_its_gradient_equal_the_token_loop() -> None:
    torch.manual_seed(3)
    query, key, value = torch.randn(3, 1, 2, 128, 8, requires_grad=True)
    decay, beta = -torch.rand(1, 2, 128), torch.rand(1, 2, 128)
    key = torch.nn.functional.normalize(key + 2, dim=-1)
    state, outputs = torch.zeros(1, 2, 8, 8), []
    for t in range(128):
        parts = (x[:, :, t] for x in (query, key, value, decay, beta))
        output, state = step_rule(state, *parts)
        outputs.append(output)
    looped, chunked = torch.stack(outputs, 2), chunked_rule(query, key, value, decay, beta)
    torch.testing.assert_close(chunked, looped, atol=2e-5, rtol=1e-4)
    wanted = torch.autograd.grad(looped.square().sum(), value, retain_graph=True)
    actual = torch.autograd.grad(chunked.square().sum(), value)
    torch.testing.assert_close(actual, wanted, atol=1e-3, rtol=1e-3)


def test_generation_prompts_render_as_the_family_does() -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>\nold\n</think>\n\nb"},
        {"role": "user", "content": "c"},
    ]
    render = chat_template().render
    turns = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
    turns += "<|im_start|>user\nc<|im_end|>\n"
    assert render(messages=messages) == turns
    opened = turns + "<|im_start|>assistant\n<think>\n"
    assert render(messages=messages, add_generation_prompt=True) == opened
    closed = render(messages=messages, add_generation_prompt=True, enable_thinking=False)
    assert closed == opened + "\n</think>\n\n"
    with pytest.raises(Exception, match="No user query"):
        render(messages=[{"role": "assistant", "content": "b"}])


def test_text_survives_the_tokenizer() -> None:
    text = "def f(x):\n    return x == 1234  # naïve\n\nHAMLET.\nTo be, or not to be<|im_end|>"
    ids = encode(text)
    assert load_tokenizer().decode(ids, skip_special_tokens=False) == text
    assert max(ids) < PUBLIC_VOCAB
