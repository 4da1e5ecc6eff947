"""What is to be optimised: tasks, the built-in suite, a generator of more, loaders of KernelBench, modules and rows of data sets."""
