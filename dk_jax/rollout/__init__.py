"""One step's episodes of the three agents against the sandbox."""
