"""Training: one joint update of the three agents, the state it depends on, and the phases of a run."""
