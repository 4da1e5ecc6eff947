"""The trusted side of one evaluation: drives runners, compares, keeps the clock. Executes no task or
candidate code."""
