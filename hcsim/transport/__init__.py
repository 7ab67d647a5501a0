"""Messages over channels."""
