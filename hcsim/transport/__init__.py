"""The transport layer: messages over channels."""
