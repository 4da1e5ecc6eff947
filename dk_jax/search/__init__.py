"""Ways to spend the turns of an evaluation's samples."""
