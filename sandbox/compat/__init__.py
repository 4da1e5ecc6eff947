"""Other projects' ways to ask for a verdict, answered by a sandbox.

`kernelgym` serves KernelGYM's HTTP API in front of a running sandbox; `kernelbench` holds KernelBench's evaluate function.
Both translate and judge nothing themselves.
"""
