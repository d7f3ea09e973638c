"""What a run commits, written to CSV files, TensorBoard, Weights & Biases or MLflow; slows no step, ends no run."""
