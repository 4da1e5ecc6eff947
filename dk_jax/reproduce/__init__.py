"""The ablation: arms of one recipe, trained and evaluated in resumable pieces, and what comes of it as tables, plots and text."""
