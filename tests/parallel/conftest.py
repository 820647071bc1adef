"""Tests over several devices: eight that the CPU plays, in a process of their own, since with eight
every other test would take longer. tests/test_parallel.py starts it; by hand it is

JLLM_TEST_DEVICES=8 pytest tests/parallel
"""

import os

collect_ignore_glob = [] if "JLLM_TEST_DEVICES" in os.environ else ["test_*.py"]
