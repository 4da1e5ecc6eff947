"""What is to be optimised: tasks, the built-in suite, a generator of more, and a loader of KernelBench directories."""
