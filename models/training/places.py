"""Where things lie in the repository."""

from pathlib import Path

MODELS = Path(__file__).resolve().parents[1]
DOCUMENTS = MODELS / "corpus" / "documents.jsonl.xz"
MANIFEST = MODELS / "corpus" / "manifest.json"
PROMPTS = MODELS / "prompts.json"
BUNDLE = MODELS / "bundled"
TOKENIZER = BUNDLE / "target"
SCRATCH = MODELS / "scratch"
