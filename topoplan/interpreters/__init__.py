"""What engines do with their files: readers of their formats, and one machine that runs what they read."""
