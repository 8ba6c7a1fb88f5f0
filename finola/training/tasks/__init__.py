"""What a model is trained to do: one file for each group of training tasks."""
