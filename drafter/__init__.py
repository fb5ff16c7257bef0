"""The drafter: draft model, context rings and candidate selector behind DraftService."""
