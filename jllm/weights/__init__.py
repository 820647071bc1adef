"""Checkpoints on disk to ``Params``: one table (``layout``), two formats, and finding models."""
