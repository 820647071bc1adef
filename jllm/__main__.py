"""``python -m jllm``."""

from jllm.cli import main

main()
