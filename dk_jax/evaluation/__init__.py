"""Evaluation on held-out tasks, and the report of a run."""
