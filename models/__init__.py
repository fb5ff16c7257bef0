"""Bundled checkpoints and the scripts that made them."""
