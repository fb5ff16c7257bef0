"""Benchmarks; one command each."""
