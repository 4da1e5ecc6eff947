"""Skills: what they are, where they are kept, how they are found and how they are proven. Needs no JAX."""
