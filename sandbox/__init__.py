"""The judge of kernels: builds, checks, times and rewards untrusted kernels against a PyTorch reference.

Importing this package imports neither torch nor triton; `sandbox.client` and `sandbox.protocol` are all
that a user of a running server needs.
"""

__version__ = "0.1.0"
