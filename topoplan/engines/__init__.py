"""Plans and machines as files for other programs, and independent readers that run engine files."""
