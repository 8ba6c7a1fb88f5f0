"""Training runs: recipes, the engine, the tasks, and what a run leaves behind."""
