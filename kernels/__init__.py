"""Triton kernels, launched through jax-triton; imported as ``jllm.kernels``.

Each op has a plain XLA reference of the same signature in ``jllm.models``, which chooses between
the two by platform.
"""
