"""Who a node is, and which cluster it may join."""
