"""Back ends: what moves the bytes of a transfer table."""
