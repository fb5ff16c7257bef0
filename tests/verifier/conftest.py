"""A tiny byte-level tokenizer, trained on the spot."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from verifier.text import Text

# short words, so that stop strings straddle tokens; wide characters, so that tokens split them
CORPUS = [
    "the end of the story is the END of the text. ENDING, PENDING, ENDED: don't stop.",
    "def f(x):\n    return {'a': [1, 22, 333]}\n\n",
    "naïve café — “quotes” … ½ ß ø",
    "中文字符中国人中文 日本語の文字 한국어 글자",
    "🙂🙃🚀 👩‍👩‍👧‍👦 🇳🇴 e\u0301",
] * 20


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            # characters of wide scripts are not kept apart, so merges may end inside one
            pre_tokenizers.Split(Regex(r" ?\S+|\s+"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(
        [
            AddedToken("<|endoftext|>", special=True, normalized=False),
            AddedToken("<|im_start|>", special=True, normalized=False),
            AddedToken("<|im_end|>", special=True, normalized=False),
            AddedToken("<think>", special=False, normalized=False),
            AddedToken("<a b>", special=False, normalized=False),
            AddedToken("<é>", special=False, normalized=False),
        ]
    )
    return tokenizer


@pytest.fixture(scope="session")
def text(tokenizer: Tokenizer) -> Text:
    return Text(tokenizer)
