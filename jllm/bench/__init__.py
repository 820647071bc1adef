"""Benchmarks: ``python -m jllm.bench --help``."""
