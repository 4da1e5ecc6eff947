"""The cold start: kernels and skills to imitate, each judged before it is used."""
