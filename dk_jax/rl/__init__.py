"""The mathematics of one update: rewards, returns, advantages, filters, losses. Pure functions on arrays."""
