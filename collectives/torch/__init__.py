"""Plans inside torch's training loops."""
