"""The byte-level BPE of the bundled pair, in the family's published files."""

import json
from functools import cache
from pathlib import Path

import jinja2
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from .documents import read_documents
from .places import TOKENIZER

# words take their combining marks along and digits stand alone, as in the family's own split
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>"),
    *("<|object_ref_end|>", "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
]
# added tokens that decoding with skip_special_tokens keeps
VISIBLE = [
    *("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"),
    *("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>"),
    *("<think>", "</think>"),
]
# the family lists these in tokenizer_config.json alone; the first one is the DFlash2 mask
CONFIG_ONLY = [
    *("<|audio_start|>", "<|audio_end|>", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>"),
    *("<tts_text_bos_single>", "<|audio_pad|>"),
]
VOCAB_SIZE = 4096
RESERVED_ROWS = 8
PUBLIC_VOCAB = VOCAB_SIZE - RESERVED_ROWS
BASE_VOCAB = PUBLIC_VOCAB - len(SPECIAL) - len(VISIBLE) - len(CONFIG_ONLY)
END_OF_TEXT = BASE_VOCAB
IM_END = BASE_VOCAB + SPECIAL.index("<|im_end|>")
AUDIO_START = PUBLIC_VOCAB - len(CONFIG_ONLY)


def added_token(content: str, special: bool) -> dict[str, object]:
    """Returns one entry of `added_tokens`, as both files spell it."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"content": content, **flags, "special": special}


def build_tokenizer(folder: Path = TOKENIZER) -> None:
    """Trains the BPE on the training documents and writes its three files."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=BASE_VOCAB,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [document.text for document in read_documents() if document.split == "train"]
    tokenizer.train_from_iterator(texts, trainer)
    spelled = json.loads(tokenizer.to_str())
    entries = {
        BASE_VOCAB + index: added_token(content, index < len(SPECIAL))
        for index, content in enumerate([*SPECIAL, *VISIBLE])
    }
    spelled["added_tokens"] = [{"id": id_, **entry} for id_, entry in entries.items()]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(spelled, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    entries |= {AUDIO_START + i: added_token(text, True) for i, text in enumerate(CONFIG_ONLY)}
    config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": {str(id_): entry for id_, entry in entries.items()},
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": 4096,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")


@cache
def load_tokenizer(folder: Path = TOKENIZER) -> Tokenizer:
    """Returns the tokenizer with the tokens that only tokenizer_config.json knows merged in."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(CONFIG_ONLY)
    if tokenizer.get_vocab_size() != PUBLIC_VOCAB:
        raise ValueError(f"tokens: expected {PUBLIC_VOCAB}, got {tokenizer.get_vocab_size()}")
    return tokenizer


def encode(text: str) -> list[int]:
    """Returns the token ids of a text."""
    return load_tokenizer().encode(text, add_special_tokens=False).ids


@cache
def chat_template(folder: Path = TOKENIZER) -> jinja2.Template:
    """Returns the compiled chat template."""
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment.globals["raise_exception"] = raise_exception
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string((folder / "chat_template.jinja").read_text())
