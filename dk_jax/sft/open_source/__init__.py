"""Triton kernels of open packages: read, made self-contained by rules on their syntax trees, paired with references of ours, judged."""
