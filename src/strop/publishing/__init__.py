"""Moving weights from the trainer to the engines, and proving that they arrived."""
