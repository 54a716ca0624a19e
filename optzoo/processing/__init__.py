"""What happens to gradients before the optimizer: filters, clips, summaries and checks."""
