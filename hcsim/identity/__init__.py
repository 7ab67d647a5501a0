"""Node identity: keys, cluster secrets, admission, and the trust list."""
