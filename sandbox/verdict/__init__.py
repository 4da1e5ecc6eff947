"""Verdicts: correctness, timing statistics, coverage, reward and feedback. Runs no task or candidate code."""
