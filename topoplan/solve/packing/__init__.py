"""Pack spanning trees into the links between ranks."""
