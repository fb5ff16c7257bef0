"""Generated protocol modules; see protos/generate.py."""
