"""Object stores: a real S3 server on this machine."""
