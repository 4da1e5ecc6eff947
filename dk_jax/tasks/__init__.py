"""What is to be optimised: tasks, the built-in suite, a generator of more, a loader of KernelBench files."""
